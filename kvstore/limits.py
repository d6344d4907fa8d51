"""Every bound of the system, in one place, with asserts on how the bounds relate.

Sizes are bytes, times are nanoseconds unless the name says otherwise.
"""

from __future__ import annotations

from typing import Final

KiB: Final = 1024
MiB: Final = 1024 * KiB
GiB: Final = 1024 * MiB
MS_NS: Final = 1_000_000
SECOND_NS: Final = 1_000_000_000

# --- keys and layout -------------------------------------------------------------------------------------------
DIGEST_BYTES: Final = 32
EXTRA_BYTES_MAX: Final = 64 * KiB
CHUNK_TOKENS_MAX: Final = 65_536
SHARDS_MAX: Final = 1_024
PARTS_MAX: Final = 32
LAYERS_MAX: Final = 4_096
NAME_BYTES_MAX: Final = 1_024
SALT_BYTES_MAX: Final = 1_024
PAYLOAD_BYTES_MAX: Final = 64 * MiB
CHECKSUM_BYTES_MIN: Final = 4 * KiB
CHECKSUM_BYTES_DEFAULT: Final = 64 * KiB
CHECKSUM_BYTES_MAX: Final = 1 * MiB
RUN_BYTES_DEFAULT: Final = 64 * MiB
RUN_BYTES_MAX: Final = 16 * GiB
RUN_TOKENS_DEFAULT: Final = 8_192  # 4 runs in a chain of 32k tokens: one dead target of N costs 2/N of it at most
ENGINE_HASH_BYTES_MAX: Final = 256
VOLATILE_TTL_NS_MAX: Final = 24 * 3600 * SECOND_NS
LAYOUT_BYTES_MAX: Final = 48 * KiB
LAYOUT_NAME_BYTES_MAX: Final = 64
CANONICAL_DEPTH_MAX: Final = 8

# --- disk ------------------------------------------------------------------------------------------------------
PAGE_BYTES: Final = 4 * KiB
SEGMENT_BYTES_MIN: Final = 1 * MiB
SEGMENT_BYTES_SMALL: Final = 32 * MiB  # below it an eviction frees little for what it costs
SEGMENT_BYTES_MAX: Final = 1 * GiB
SEGMENT_HEADERS_STEP_BYTES: Final = 64 * KiB  # a default segment is longer by the headers of its records, in such steps
SEGMENTS_ON_DRIVE_MIN: Final = 4  # one open, one closing, one being evicted, one to evict next
SEGMENTS_MAX: Final = (1 << 20) - 1  # 20 bits of a location name the segment
SEGMENTS_CLOSING_MAX: Final = 16  # full segments that wait for unfinished layer-wise writes; at most a quarter of all
LOG_HALF_BYTES_MIN: Final = 256 * KiB
LOG_HALF_BYTES_MAX: Final = 64 * MiB
LOG_BATCH_BYTES_MAX: Final = 256 * KiB  # a batch fits the smallest half beside its checkpoint
LOG_WRITE_ATTEMPTS_MAX: Final = 3
LOG_SHARE_COMMITS: Final = 0.5  # of a half: commits of segments that are not sealed
LOG_SHARE_MANIFESTS: Final = 0.1875  # of a half: namespaces
LOG_SHARE_GRAVES: Final = 0.0625  # of a half: deletes that are remembered for others
LOG_SHARE_TOMBSTONES: Final = 0.125  # of a half: deletes in sealed segments; more, and a segment is evicted for it
LOG_SHARE_BATCH: Final = 0.125  # of a half: one batch
EVICT_AHEAD_SEGMENTS_MIN: Final = 24  # of a drive: one is freed before it is needed; of fewer a free one is too dear
MOVE_SHARE_OF_SEGMENT: Final = 0.25  # of the open segment: left when eviction begins, for what is kept (1 - 1 / 1.3)
MOVE_SHARE_MAX: Final = 0.5  # of a segment: more of it pinned, and moving that gains too little
RECOVERY_BATCH_BYTES: Final = 64 * MiB  # segment indexes in memory at once
SPACE_RETRY_NS_MIN: Final = 5 * SECOND_NS  # how soon a full file system is tried again
SPACE_RETRY_NS_MAX: Final = 300 * SECOND_NS
QUEUE_DEPTH_DEFAULT: Final = 32
QUEUE_DEPTH_MAX: Final = 256
DRIVE_BYTES_IN_FLIGHT_MAX: Final = 4 * MiB  # 14 GB/s, the fastest drives, times 0.2 ms and some; more only waits there
DRIVE_BYTES_AT_FIRST: Final = 1 * MiB  # of them at least, until an idle drive has completed something
DRIVE_BYTES_IN_GROUPS_MAX: Final = 8 * MiB  # of a drive that answers all it was given at once, and stands still then
DRIVE_LAST_GROUP_BYTES: Final = 2 * MiB  # as much as such a drive gets at once of the last
DRIVE_ALONE_NS: Final = 10 * SECOND_NS  # so long ago others used it: who comes more often waits for less
DRIVE_WRITE_BYTES_IN_FLIGHT_MAX: Final = 8 * MiB  # while nobody waits for a read: two long writes, and none in between
DRIVE_WRITE_BYTES_QUIET_MAX: Final = 16 * MiB  # while nobody has read for DRIVE_QUIET_NS: who does then waits 6 ms
DRIVE_QUIET_NS: Final = SECOND_NS
DEVICE_IO_BYTES_MAX: Final = 4 * MiB
READ_COALESCE_BYTES: Final = 1 * MiB
PARCEL_BYTES_MAX: Final = 2 * MiB  # payload of records that are read, checked and sent together
PARCEL_BYTES_FIRST: Final = 1 * MiB  # the same of a short request's first, on its way while the rest is read
RANGE_WHOLE_BYTES: Final = 256 * KiB  # a record up to this is read whole even if only a range of it is wanted
DEVICE_LOCK_WAIT_NS: Final = 10 * SECOND_NS
DEVICE_CLAIM_WAIT_NS: Final = 200 * MS_NS
DEVICE_RETRIES_MAX: Final = 64
DEVICE_THREADS_MAX: Final = 32
EXTENTS_PER_THREAD: Final = 4  # of a scattered read, that one thread of the pool reads one after the other
DEVICE_FAILED_AFTER_ERRORS: Final = 8
DEVICE_SUSPECT_NS: Final = 30 * SECOND_NS
QUEUED_OPS_MAX: Final = 65_536
IO_VECTORS_MAX: Final = 1024  # IOV_MAX of Linux, readv(2)
REGISTERED_PIECE_BYTES: Final = 1 * GiB  # io_uring_register_buffers(3): at most 1 GiB per buffer

# --- wire ------------------------------------------------------------------------------------------------------
FRAME_BODY_BYTES_MAX: Final = 4 * MiB
BODY_FIRST_BYTES: Final = 64 * KiB  # reserved for a body of any announced length; more as it arrives
REQUESTS_BYTES_MAX: Final = 256 * MiB  # bodies and inline payload of all connections of a worker together
REQUESTS_BYTES_SMALL: Final = 64 * MiB  # of them, kept for what is no longer than INLINE_PUT_BYTES_MAX
REQUESTS_BYTES_PER_CLIENT_MAX: Final = 64 * MiB  # of them, over all connections of one client process
SLICE_BYTES_MAX: Final = 1 * MiB
FRAME_PAYLOAD_BYTES_MAX: Final = 2 * MiB
BATCH_ITEMS_MAX: Final = 65_536
INLINE_PUT_BYTES_MAX: Final = 256 * KiB
MANIFEST_BYTES_MAX: Final = 64 * KiB
RANGES_PER_ITEM_MAX: Final = 4_096
RANGES_PER_CALL_MAX: Final = FRAME_BODY_BYTES_MAX // 16  # as many as fit a body if each item has its own; 60 ms to plan
HELLO_BODY_BYTES_MAX: Final = 16 * KiB  # before HELLO is accepted a peer may make us hold no more
HELLO_WAIT_NS: Final = 10 * SECOND_NS
TOKEN_BYTES_MAX: Final = 8 * KiB
TOKEN_BYTES_MIN: Final = 16  # shorter ones can be guessed
TOKENS_MAX: Final = 1_024  # each HELLO is compared with all of them
TENANTS_MAX: Final = 256
CLUSTER_ID_BYTES: Final = 16
CLUSTER_ASK_NS: Final = 3 * SECOND_NS  # at its start, for the id of a cluster that a node was in before
CLUSTER_JOIN_NS: Final = 60 * SECOND_NS  # of one that it was never in: without it nobody knows whose its drives are
TENANTS_FILE_BYTES_MAX: Final = 1 * MiB
NODE_ID_BYTES_MAX: Final = 256
LOCAL_NAME_BYTES_MAX: Final = 256  # of a host's digest, or a socket's path (108 bytes in unix(7))
VIEW_BYTES_MAX: Final = 1 * MiB
ERROR_TEXT_BYTES_MAX: Final = 4 * KiB
DETAIL_BYTES_MAX: Final = 1 * KiB
ADMIN_BYTES_MAX: Final = 2 * MiB
ADMIN_ENTRIES_MAX: Final = 65_536
MESSAGE_FIELDS_MAX: Final = 64
READ_AHEAD_BYTES: Final = 8 * KiB
SLICES_PER_FRAME_MAX: Final = 960  # with header and read-ahead a frame's iovecs stay within IO_VECTORS_MAX
REQUEST_NS_MAX: Final = 3600 * SECOND_NS
IDLE_WAIT_NS: Final = 600 * SECOND_NS
MEMORY_READ_BYTES_MAX: Final = 8 * MiB  # of one read from memory that a connection has queued, and holds, at a time
FRAME_AIM_BYTES: Final = 1 * MiB  # payload that a node puts into one frame, and a connection's turn to send
PAYLOAD_WAKE_BYTES: Final = 1 * MiB  # of a granted put's payload: a connection is woken for no less while more comes
WRITE_JOIN_BYTES_MAX: Final = DEVICE_IO_BYTES_MAX + 256 * KiB  # of neighbours in one write: a wave with its headers
WRITE_WAVE_BYTES: Final = 4 * MiB  # of a put's arrived records that go to the drive together while more are coming
WRITE_WAVE_NS: Final = 5 * MS_NS  # how long they wait for each other
PUT_PARCEL_BYTES: Final = 4 * MiB  # payload of records that are put together, from their grant to their commit records
PUT_PARCEL_ENDS_BYTES: Final = 1 * MiB  # of an offer's first, which the drive waits for, and a short one's last
PUT_SHORT_PARCELS: Final = 2  # an offer of so many, or fewer, is short
PUT_PARCEL_RECORDS_MAX: Final = 32  # of one parcel; their commit records stand in one block of the log
PUT_WINDOW_BYTES: Final = 32 * MiB  # of one connection's offers that wait for a grant, for payload or for the drive
PUT_WINDOW_ITEMS: Final = 1_024
RESULTS_PER_FRAME_MAX: Final = 4_096
RESULTS_WAIT_NS: Final = 40 * MS_NS  # between two RESULT frames of an offer whose items have not all ended
SWEEP_NS: Final = 250 * MS_NS  # how soon an overdue connection or call is noticed
PEER_STALL_NS: Final = 30 * SECOND_NS  # for a peer to read, or to go on with what it began to send
PEER_STALL_WAITED_NS: Final = 3 * SECOND_NS  # the same while others wait for the memory that it may hold
PEER_RATE_BYTES_SECOND_MIN: Final = 32 * KiB  # of a peer that goes on, see kvstore/server/headway.py
PEER_DRAINS_NS: Final = 30 * SECOND_NS  # in which a peer must move as much as it holds, while others wait for memory
REQUEST_ARRIVES_NS: Final = 30 * SECOND_NS  # for a long body, or inline payload, from its first byte to its last
REQUEST_ARRIVES_WAITED_NS: Final = 5 * SECOND_NS  # the same while others are refused for the memory that it holds
LINGER_NS: Final = 2 * SECOND_NS  # for a peer to read our last words
ACCEPTS_PER_EVENT_MAX: Final = 64

# --- folders and sockets of one process ------------------------------------------------------------------------
UNIX_PATH_BYTES_MAX: Final = 107  # sun_path without the zero behind it, unix(7)
FOLDER_ATTEMPTS_MAX: Final = 16
LEFT_FOLDERS_REMOVED_MAX: Final = 1_024  # at one start, of processes that were killed
TEMPORARY_NAMES_READ_MAX: Final = 100_000  # others may fill the folder for temporary files

# --- shared memory ---------------------------------------------------------------------------------------------
REGIONS_PER_CONNECTION_MAX: Final = 1_024
REGIONS_PER_CLIENT_MAX: Final = 4 * REGIONS_PER_CONNECTION_MAX  # two connections, and two that are about to end
REGIONS_MAX: Final = 16_384  # of all clients: each is a descriptor and one of 65,530 mappings (vm.max_map_count)
REGIONS_SHARE_OF_FILES: Final = 0.5  # of the open files that are allowed: connections need the others
ALLOCATED_OF_FREE_MAX: Final = 0.9  # of the memory that is free, what one allocation may take at once
REGION_BYTES_PER_CLIENT_MAX: Final = 64 * GiB  # mapped for one process; page tables of it take 1/512
REGION_BYTES_MAX: Final = 256 * GiB  # mapped for all clients of a worker
UNMAP_PIECE_BYTES: Final = 4 * MiB  # of a client's memory, at once: about .6 ms, in which nobody else maps any
BOUNCE_BYTES_MAX: Final = 64 * MiB  # of a connection: through it come records for memory that is not shared
BOUNCE_BYTES_ALL_MAX: Final = 512 * MiB  # of a client's connections together
REGION_DESCRIPTORS_WAITING_MAX: Final = 16  # received and not claimed by a REGION yet
ANSWER_LOOK_NS: Final = 250_000  # a single read of shared memory looks for its answer, before it sleeps
PLACES_PER_CALL_MAX: Final = 4_096  # items of one call whose memory is named
DIRECT_WINDOW_BYTES: Final = 17 * MiB  # of one request: reads from the drive into a client's memory, under way
DIRECT_TURN_BYTES: Final = 4 * MiB  # of them that are begun in one turn of a request
DETACHED_RANGES_MAX: Final = 64  # of one allocation: more, and all of it goes by the socket from then on

# --- node ------------------------------------------------------------------------------------------------------
NAMESPACES_MAX: Final = 65_536
NAMESPACES_PER_TENANT_MAX: Final = 16_384  # where there are tenants: so that one cannot use up the table
MANIFESTS_SHARE_TENANT: Final = 0.25  # of the bytes that a drive keeps of manifests: the same
DROPPED_TOLD_MAX: Final = 32_768  # namespaces that were dropped, as one worker tells the others
CONNECTIONS_MAX: Final = 8_192
STAGING_BYTES_DEFAULT: Final = 128 * MiB
CACHE_BYTES_DEFAULT: Final = 1 * GiB
WARMING_STEP_BYTES: Final = 8 * MiB  # touched in one call: 90 ms where a host must find it, which a shutdown waits for
WARMING_NICENESS: Final = 10
READ_WINDOW_BYTES: Final = 16 * MiB
READ_PART_RANGES: Final = 2_048  # of one GET that are planned at one time
READ_PART_REPEATS: Final = 512  # the same where a record is asked for twice: all may be there at once, 10 ms then
READ_PART_KEYS: Final = 8_192  # different records wanted whole, likewise: 5 ms if none of them is there
READ_TURN_OPS_MAX: Final = 1_024  # device operations that one turn of a request may begin: a parcel of single pages
READS_IN_FLIGHT_MAX: Final = 128  # device operations; more would only wait in the dispatch queue and hold memory
SUSPECT_RECORDS_MAX: Final = 4_096  # records that the drive failed to read once
GRANTS_WAITING_MAX: Final = 65_536
MOVES_IN_FLIGHT_MAX: Final = 16  # records of a victim that are read and written again side by side
OWNER_SWEEP_NS: Final = 250 * MS_NS  # how soon a put without an owner is noticed
WRITE_ATTEMPTS_MAX: Final = 2  # a record whose write failed is tried once more, in another segment
WRITERS_PER_CLIENT_MAX: Final = 64
QUOTA_TRIM_SHARE: Final = 0.95  # of a tenant's quota: beyond, its oldest records go
QUOTA_TRIM_TO_SHARE: Final = 0.9
TRIM_RECORDS_MAX: Final = 4_096  # of a tenant, forgotten in one turn
WRITER_BYTES_PER_CLIENT_MAX: Final = 1 * GiB
WRITER_TTL_NS: Final = 30 * SECOND_NS
PIN_TTL_NS_MAX: Final = 600 * SECOND_NS
PIN_TTL_NS_DEFAULT: Final = 30 * SECOND_NS
PINNED_SHARE_CLIENT: Final = 0.25
PINNED_SHARE_TARGET: Final = 0.50
PINS_MAX: Final = 65_536
PINS_PER_KEY_MAX: Final = 65_535
GROUP_BYTES: Final = 16  # the name of those who look up together
MATCH_GROUP_NS: Final = 10 * SECOND_NS  # how long those who ask together may be apart
MATCH_GROUPS_BYTES_MAX: Final = 16 * MiB
HISTORY_ENTRIES_MAX: Final = 16_384
HISTORY_BYTES_MAX: Final = 1 * MiB  # of the file that keeps them
HISTORY_SAVE_NS: Final = 60 * SECOND_NS
CACHE_GHOSTS_MAX: Final = 65_536
HEADERS_BYTES_MAX: Final = 32 * MiB  # record headers remembered for range reads
CACHE_RECORD_SHARE_MAX: Final = 0.125
VOLATILE_SHARE_MAX: Final = 0.25  # of the RAM cache, for records that live in RAM only
INDEX_ENTRIES_MAX: Final = 1 << 29  # address space for 30 bytes a slot; memory is what is in use
ANCESTORS_MAX: Final = 65_536
ACCESS_TICK_NS: Final = 100 * MS_NS  # u32 ticks last 13 years

CAPACITY_BYTES_MIN: Final = 64 * MiB
CLUSTER_VALUE_BYTES_MAX: Final = 64 * KiB
TARGETS_MAX: Final = 4_096
RELAYS_MAX: Final = 4_096
TARGET_NAME_BYTES_MAX: Final = 256  # an id, a label, an address
RAILS_MAX: Final = 16
DATA_DIRS_MAX: Final = 64
WORKERS_MAX: Final = 64
SEGMENTS_MIN: Final = 16  # fewer, and evicting one takes too much of the drive at once
STAGING_BYTES_MIN: Final = 16 * MiB
WRITE_AMPLIFICATION_DEFAULT: Final = 1.3
WRITE_AMPLIFICATION_MAX: Final = 10.0
SCRUB_BYTES_SECOND_DEFAULT: Final = 2 * MiB
SCRUB_REST_NS: Final = 60 * SECOND_NS  # between rounds, so that a small drive is not read without end
SHUTDOWN_NS_DEFAULT: Final = 20 * SECOND_NS
SHUTDOWN_NS_MAX: Final = 600 * SECOND_NS

# --- cluster ---------------------------------------------------------------------------------------------------
COPIES_MAX: Final = 3
HEADS_ITEMS_MAX: Final = 1_024  # of one HEADS
FORGET_KEYS_MAX: Final = 16_384  # of one FORGET
NAMESPACE_GENERATION_MAX: Final = 0x7FFF_FFFF  # half of what a drive counts to: whatever a peer says, DROP counts on
DROPS_AHEAD_MAX: Final = 1 << 20  # that a worker may have missed, as one that joins: a drop a minute for two years
PULL_QUEUE_RECORDS_MAX: Final = 65_536  # that wait to be copied to one worker
PULL_BATCH_RECORDS: Final = 64  # asked of a source at once
PULL_FAILURES_MAX: Final = 6  # of a source in a row: 6 s with their pauses; then what it was named for is given up
PULL_BACKOFF_NS_MIN: Final = 200 * MS_NS
PULL_BACKOFF_NS_MAX: Final = 30 * SECOND_NS
PULL_WINDOW_BYTES: Final = 8 * MiB  # of one batch that are on their way at a time; one longer record goes alone
PULL_SOURCES_MAX: Final = 4  # batches under way, each from another source
PULL_GET_NS: Final = 60 * SECOND_NS  # for one window
PULL_CLOSED_NS: Final = 1 * SECOND_NS  # how soon a node that took nothing new looks whether it may again
PULL_STALL_NS: Final = 120 * SECOND_NS  # without any progress of a batch: longer than a window may take
PULL_BURST_BYTES: Final = 8 * MiB  # of the byte budget
PULL_BYTES_SECOND_DEFAULT: Final = 64 * MiB
REPAIR_WINDOW_NS: Final = 25 * 3600 * SECOND_NS  # for which deletes are remembered: a while longer than DOWN_KEEP_NS
GRAVES_MAX: Final = 65_536  # deletes remembered on a drive
NEWS_STEP_GRAVES: Final = 1_024  # looked at in one turn, for whoever has come back: 2 us each
TELL_RETRY_NS: Final = 1 * SECOND_NS  # before a worker that did not answer is told again what was deleted
TELL_TRIES_MAX: Final = 30
HANDOVER_POLL_NS: Final = 100 * MS_NS  # how often a draining worker is asked whether it has handed on all
HANDOVER_WAIT_NS_MAX: Final = 3600 * SECOND_NS  # that a caller may wait for the end of a drain, as `kvstore --timeout`
HANDOVER_ANSWER_NS: Final = 500 * MS_NS  # left of a caller's deadline for the answer
SPREAD_SETTLE_NS: Final = 5 * SECOND_NS  # after a view change, before copies are looked after: more may follow
SPREAD_REST_NS: Final = 600 * SECOND_NS  # between two rounds over all records
SPREAD_PAUSE_NS: Final = 100 * MS_NS  # between two batches of a round: 640 headers a second
SPREAD_RETRY_NS: Final = 200 * MS_NS  # before somebody whose queue was full is told again
SPREAD_TRIES_MAX: Final = 5
SPREAD_TRIES_DRAINING: Final = 50  # 10 s without any progress
SPREAD_GROUPS_MAX: Final = 32  # batches told that are not taken, or while draining not fetched yet
WALK_BATCH_RECORDS: Final = 64  # headers read side by side
PEERS_MAX: Final = 64  # connections of one worker to others
PEER_LOOKUPS_MAX: Final = 4  # host names of others that are looked up at a time, each in a thread
PEER_CONNECT_NS: Final = 2 * SECOND_NS  # TCP connect and HELLO
PEER_CALL_NS: Final = 30 * SECOND_NS  # silence of another worker in the middle of a call
PEER_IDLE_NS: Final = 30 * SECOND_NS
PREVIOUS_PLACEMENTS_MAX: Final = 4  # each is one more place where a lookup may have to ask
PREVIOUS_KEEP_NS_DEFAULT: Final = 3600 * SECOND_NS
PREVIOUS_KEEP_NS_MAX: Final = 7 * 24 * 3600 * SECOND_NS
PLACE_CELLS_MAX: Final = 1 << 18  # scores (heads times targets) computed at once: 2 MiB an array
DOWN_KEEP_NS: Final = 24 * 3600 * SECOND_NS  # a target that stays away longer leaves the view
ABSENT_GRACE_NS: Final = 10 * SECOND_NS  # for nodes to register anew with a store that came back empty
SHARE_TICK_NS: Final = 2 * SECOND_NS  # between two times that a node says what tenants use, and settles its shares
SHARE_RISE_NS: Final = 10 * SECOND_NS  # by then every node has seen what another one said; or its lease is over
SHARE_PUBLISH_PARTS: Final = 256  # of a quota: a use that changed by less is not told before SHARE_REPEAT_NS
SHARE_REPEAT_NS: Final = 30 * SECOND_NS
STATUS_NODE_NS: Final = 3 * SECOND_NS  # for another node to answer `kvstore status`
STATUS_NODES_AT_ONCE: Final = 64
LEASE_TTL_NS_DEFAULT: Final = 10 * SECOND_NS
LEASE_TTL_NS_MIN: Final = 1 * SECOND_NS  # etcd counts whole seconds
LEASE_TTL_NS_MAX: Final = 600 * SECOND_NS
REJOIN_NS_MIN: Final = 30 * SECOND_NS  # between two times that a node comes back after it was fenced
STORE_CALL_NS: Final = 5 * SECOND_NS  # one call of the cluster store over all its members
STORE_ATTEMPT_NS: Final = 1 * SECOND_NS  # one member of it, before the next is asked
STORE_PAUSE_NS: Final = 50 * MS_NS  # between two attempts
STORE_ENTRIES_MAX: Final = 65_536
STORE_NAME_BYTES_MAX: Final = 1_024
STORE_VALUE_BYTES_MAX: Final = 1 * MiB  # etcd takes requests of 1.5 MiB
STORE_MEMBERS_MAX: Final = 16
STORE_MESSAGE_BYTES_MAX: Final = 256 * MiB  # all entries of a cluster in one answer
STORE_RETRY_NS_MIN: Final = 100 * MS_NS
STORE_RETRY_NS_MAX: Final = 2 * SECOND_NS

# --- supervisor ------------------------------------------------------------------------------------------------
CONTROL_DEADLINE_NS: Final = 10 * SECOND_NS
WORKER_RECOVERY_NS: Final = 3600 * SECOND_NS
WORKER_STOP_GRACE_NS: Final = 5 * SECOND_NS
SIGNAL_ECHO_NS: Final = 300 * MS_NS  # a second SIGTERM so soon is the first one, told twice, as `timeout` does
WORKER_BACKOFF_NS_MIN: Final = 200 * MS_NS
WORKER_BACKOFF_NS_MAX: Final = 10 * SECOND_NS
WORKER_HEALTHY_NS: Final = 60 * SECOND_NS
WORKER_PULSE_NS: Final = 2 * SECOND_NS  # between two signs of life
WORKER_PULSE_WAIT_NS: Final = 5 * SECOND_NS
WORKER_SILENCES_MAX: Final = 4  # then it hangs: 28 s, longer than any call that its drives may hold up
EDGE_CONNECTIONS_MAX: Final = 1_024
EDGE_FIRST_BYTES_NS: Final = 10 * SECOND_NS
EDGE_IDLE_NS: Final = 600 * SECOND_NS  # of a relayed connection; gRPC's own traffic keeps one alive that is in use
GRPC_IDLE_NS: Final = 300 * SECOND_NS  # without a call; clients connect again by themselves
GRPC_KEEPALIVE_NS: Final = 120 * SECOND_NS
GRPC_KEEPALIVE_WAIT_NS: Final = 20 * SECOND_NS
EDGE_RELAY_BYTES: Final = 64 * KiB
HTTP_HEAD_BYTES_MAX: Final = 8 * KiB
GRPC_MESSAGE_BYTES_MAX: Final = 64 * MiB  # above the limits that we check and name ourselves
GRPC_CALLS_MAX: Final = 256
NAMESPACES_PAGE_MAX: Final = 24
NAMESPACES_PAGE_LIMIT_MAX: Final = 1_000
NAMESPACES_PAGE_BYTES_MAX: Final = 2 * MiB
EXPLAIN_KEYS_MAX: Final = 4_096
EXPLAIN_NAMESPACES_MAX: Final = 8

# --- doctor ----------------------------------------------------------------------------------------------------
DOCTOR_FILE_BYTES_MAX: Final = 1 * MiB  # of a file in /proc or /sys; the largest, a table of sockets, is cut there
DOCTOR_DUMP_BYTES_MAX: Final = 4 * MiB  # of a table of the kernel
DOCTOR_DUMP_NS_MAX: Final = 1 * SECOND_NS
DOCTOR_DIAL_NS_MAX: Final = 1 * SECOND_NS  # for one address to answer
DOCTOR_REPLY_BYTES_MAX: Final = 64 * KiB
ETCD_LATENCY_NS_MAX: Final = 50 * MS_NS  # half a heartbeat of etcd; slower, and leases run out under load
ETCD_PROBES: Final = 3
DESCRIPTORS_OWN: Final = 128  # of a worker's drives, rings, pipes, sockets to the supervisor
OPEN_FILES_MIN: Final = 512

# --- client ----------------------------------------------------------------------------------------------------
CONNECTIONS_PER_WORKER_DEFAULT: Final = 2
CALL_DEADLINE_NS_DEFAULT: Final = 30 * SECOND_NS
INTEGRATION_STAGING_BYTES: Final = 64 * MiB
INTEGRATION_RESTORE_ATTEMPTS: Final = 4
CONNECT_NS_MAX: Final = 2 * SECOND_NS  # one TCP connect and HELLO; a loopback or rack takes well under a millisecond
NAME_LOOKUPS_MAX: Final = 16  # host names that one client process looks up at a time, each in a thread
CONNECTION_IDLE_NS_MAX: Final = 60 * SECOND_NS
ORPHAN_NS_MIN: Final = SECOND_NS  # a connection that is in use for so long may have been lost by an interrupted call
CALLS_WAITING_MAX: Final = 256  # calls of one process that wait for a connection to one target
DRAIN_BYTES_MAX: Final = 4 * MiB  # what an ended call may leave unread before closing its connection is cheaper
DRAIN_NS_MAX: Final = 100 * MS_NS
RETRY_BUDGET_TOKENS_MAX: Final = 16
RETRY_BUDGET_RATIO: Final = 0.1
RETRY_TRICKLE_NS: Final = 1 * SECOND_NS
RETRIES_PER_CALL_MAX: Final = 8
RETRY_BACKOFF_NS_MIN: Final = 10 * MS_NS
RETRY_BACKOFF_NS_MAX: Final = 500 * MS_NS
READ_RETRIES_MAX: Final = 2  # a read that keeps failing is a miss, and the worker recomputes
BREAKER_FAILURES_MAX: Final = 3
BREAKER_SILENCE_NS: Final = 1 * SECOND_NS  # a call that heard nothing for so long counts against its target
BREAKER_OPEN_NS_MIN: Final = 100 * MS_NS
DOUBT_NS: Final = 6 * SECOND_NS  # a target that is live by the view and silent is asked again by calls that have time
BREAKER_OPEN_NS_MAX: Final = 1 * SECOND_NS
BREAKER_PROBE_NS: Final = (
    250 * MS_NS
)  # for the HELLO of a target that was silent; a live one answers within a millisecond
PLACE_SILENCE_NS: Final = 1 * SECOND_NS  # a place that says nothing for so long is given up for the next one
LAST_SILENCE_NS: Final = 2 * SECOND_NS  # the last place of a read, or one of a copy: then it must answer a HELLO
WAIT_SLICE_NS: Final = 500 * MS_NS  # a node is asked to wait for pending keys for so long, then it must say something
FOUND_NS: Final = 30 * SECOND_NS  # for so long a read asks first where a lookup has found a key that had moved
FOUND_KEYS_MAX: Final = 65_536
DOWN_SILENCE_NS: Final = 250 * MS_NS  # for a target that the view calls down, asked when nobody else has a record
DOWN_REST_NS: Final = 5 * SECOND_NS  # one of these that did not answer is left alone, so misses stay fast
DOWN_PLACES_MAX: Final = 2  # of these for each run: another one that held it may be asked after a while
ADDRESS_REST_NS: Final = 2 * SECOND_NS  # one of several ways to a target that failed: the others carry on meanwhile
ADDRESS_REST_NS_MAX: Final = 32 * SECOND_NS  # and twice as long each time that it fails again, up to this
PULL_PAUSE_NS: Final = 100 * MS_NS  # between two hints of one client process that a target lacks what another one has
PULL_NS_MAX: Final = 50 * MS_NS  # for such a hint, at the end of a read
PULL_KEYS_PER_HINT_MAX: Final = 256
VIEW_ASK_NS_MIN: Final = 100 * MS_NS  # for one of several nodes that may know the view, before the next is asked
VIEW_OLDER_NS: Final = 30 * SECOND_NS  # after so long of older answers only, the cluster has begun anew
PLANS_PER_CALL_MAX: Final = 2  # a call is planned once more when the view has changed under it
VIEW_RETRY_NS: Final = 200 * MS_NS  # between two tries to learn where a target is that does not answer
UNPIN_NS_MAX: Final = 500 * MS_NS  # a pin that cannot be given back in this time runs out by itself
FRAGMENTS_PER_ITEM_MAX: Final = 65_536

# --- rdma ------------------------------------------------------------------------------------------------------
CHAIN_REQUESTS_MAX: Final = 64  # work requests of one post
PAIRS_PER_CLIENT_MAX: Final = 2  # queue pairs of one client process at one worker: foreground and background
PAIRS_MAX: Final = 4_096  # of one worker
PAIR_REQUESTS_MAX: Final = 256  # work requests of one pair that are posted and have not ended
PAIR_WAITING_MAX: Final = 65_536  # pieces that wait for their turn at one pair
PAIR_READS_MAX: Final = 16  # outstanding READs of one pair; mlx5 and rxe take 16 to 128
PAIR_IDLE_NS: Final = 60 * SECOND_NS
PAIR_BACKOFF_NS_MIN: Final = 100 * MS_NS
PAIR_BACKOFF_NS_MAX: Final = 5 * SECOND_NS
PAIRS_CLOSING_MAX: Final = 64  # not destroyed yet; no more are made then
PAIR_DESTROY_AGAIN_NS: Final = 1 * SECOND_NS  # after the device refused to destroy one
PAIR_UNANSWERED_NS: Final = 20 * SECOND_NS  # by then one whose other end is gone has broken, on any device
PAIR_QUIET_NS: Final = 100 * MS_NS  # a client waits so long for its end of a pair to be destroyed
RAIL_CLOSE_NS_MAX: Final = 5 * SECOND_NS  # all pairs of a process, at its end
PAIR_PROBE_BYTES: Final = 8 * KiB  # two packets of the largest path MTU
RAIL_REQUESTS_MAX: Final = 16_384  # of all pairs of a worker: its completion queue must hold all of them if they fail
COMPLETIONS_PER_TURN_MAX: Final = 1_024  # before the event loop turns to others
PAIR_PROBE_NS_MAX: Final = 60 * SECOND_NS  # a probe ends by itself when its retries do
PAIR_OFFER_BYTES_MAX: Final = 256  # what one end of a pair is described with
RDMA_MOVING_BYTES_MAX: Final = 8 * MiB  # delivered to one connection and not in its place yet
REGION_CACHE_BYTES_DEFAULT: Final = 64 * GiB
RDMA_TRANSFER_BYTES_MAX: Final = 1 * GiB  # of one work request; max_msg_sz of RDMA devices is 1 GiB or more

# --- telemetry -------------------------------------------------------------------------------------------------
SERIES_MAX: Final = 300
TENANT_SERIES_MAX: Final = 6  # tenants with series of their own, three each

assert SLICE_BYTES_MAX <= FRAME_PAYLOAD_BYTES_MAX
assert CHECKSUM_BYTES_MAX <= SLICE_BYTES_MAX, "a checksum block must fit one slice"
assert PLACES_PER_CALL_MAX <= BATCH_ITEMS_MAX
assert REGION_BYTES_PER_CLIENT_MAX <= REGION_BYTES_MAX
assert INLINE_PUT_BYTES_MAX <= FRAME_PAYLOAD_BYTES_MAX
assert READ_AHEAD_BYTES <= BODY_FIRST_BYTES <= FRAME_BODY_BYTES_MAX, "what came with the header must fit"
assert REQUESTS_BYTES_PER_CLIENT_MAX <= (REQUESTS_BYTES_MAX - REQUESTS_BYTES_SMALL) // 2, "no client has half of it"
assert REQUESTS_BYTES_PER_CLIENT_MAX >= 6 * (FRAME_BODY_BYTES_MAX + INLINE_PUT_BYTES_MAX), "some of the largest"
assert FRAME_AIM_BYTES <= FRAME_PAYLOAD_BYTES_MAX
assert SLICES_PER_FRAME_MAX * (64 + SLICE_BYTES_MAX // CHECKSUM_BYTES_MIN * 4) <= FRAME_BODY_BYTES_MAX, "PLACED"
assert PARCEL_BYTES_MAX <= FRAME_PAYLOAD_BYTES_MAX, "a parcel is a frame"
assert PARCEL_BYTES_FIRST <= PARCEL_BYTES_MAX
assert DIRECT_TURN_BYTES // (2 * PAGE_BYTES) < READ_TURN_OPS_MAX, "a record is a header and payload"
assert DIRECT_TURN_BYTES <= DIRECT_WINDOW_BYTES
assert PARCEL_BYTES_MAX // PAGE_BYTES <= READ_TURN_OPS_MAX < QUEUED_OPS_MAX, "a turn fits the queue, or waits for it"
assert INTEGRATION_STAGING_BYTES >= PAYLOAD_BYTES_MAX, "an integration stages at least one chunk"
assert PAYLOAD_BYTES_MAX <= SEGMENT_BYTES_MAX
assert PULL_BATCH_RECORDS <= HEADS_ITEMS_MAX
assert NEWS_STEP_GRAVES <= FORGET_KEYS_MAX
assert PULL_STALL_NS > PULL_GET_NS > PEER_CALL_NS
assert LOG_SHARE_COMMITS + LOG_SHARE_MANIFESTS + LOG_SHARE_GRAVES + LOG_SHARE_TOMBSTONES + LOG_SHARE_BATCH <= 1
assert DOUBT_NS > LAST_SILENCE_NS + CONNECT_NS_MAX, "who doubts a target must have time to ask it again"
assert REPAIR_WINDOW_NS >= DOWN_KEEP_NS, "who comes back hears of every delete, unless it has left the view"
assert CHECKSUM_BYTES_MIN % PAGE_BYTES == 0
assert HELLO_BODY_BYTES_MAX > TOKEN_BYTES_MAX + NODE_ID_BYTES_MAX
assert SLICES_PER_FRAME_MAX + 8 <= IO_VECTORS_MAX
assert VIEW_BYTES_MAX < FRAME_BODY_BYTES_MAX
assert WAIT_SLICE_NS < PLACE_SILENCE_NS, "a node that waits would be taken for a silent one"
assert TENANTS_MAX * (2 * NAME_BYTES_MAX + 32) < STORE_VALUE_BYTES_MAX, "what tenants use of a target is one entry"
assert DROPPED_TOLD_MAX * (DIGEST_BYTES + 9) < ADMIN_BYTES_MAX, "all of them go into one message"
assert VIEW_BYTES_MAX <= STORE_VALUE_BYTES_MAX, "the view is one entry of the cluster store"
assert STORE_ATTEMPT_NS * 3 <= STORE_CALL_NS, "with one of three members frozen a call still reaches another"
assert GRPC_KEEPALIVE_NS + GRPC_KEEPALIVE_WAIT_NS < EDGE_IDLE_NS, "a quiet call must not be taken for an idle peer"
assert ADMIN_BYTES_MAX < FRAME_BODY_BYTES_MAX
assert READ_AHEAD_BYTES >= 80 + SLICE_BYTES_MAX // CHECKSUM_BYTES_MIN * 4, "a slice's head should fit the read-ahead"
assert BATCH_ITEMS_MAX * (DIGEST_BYTES + 16) < FRAME_BODY_BYTES_MAX, "a full batch of keys must fit one body"
assert NAMESPACES_PAGE_MAX * (MANIFEST_BYTES_MAX + KiB) < ADMIN_BYTES_MAX, "a page of namespaces must fit one answer"
assert CHAIN_REQUESTS_MAX <= PAIR_REQUESTS_MAX <= RAIL_REQUESTS_MAX, "RDMA: each holds the other"
