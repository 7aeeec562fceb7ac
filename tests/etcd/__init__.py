"""A real etcd beside our gateway: random requests in lockstep (`python -m tests.etcd`)."""
