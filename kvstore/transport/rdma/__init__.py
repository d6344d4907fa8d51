"""One-sided transfers: the node reads puts out of the client's memory and writes gets into it, by RDMA verbs."""
