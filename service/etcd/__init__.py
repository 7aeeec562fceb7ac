"""The JSON gateway of etcd v3 in front of a KV group, and the launcher that takes etcd's flags. Made by `cli_etcd`."""
