"""The control plane over gRPC, both ends: the only folder that imports grpc and protobuf."""
