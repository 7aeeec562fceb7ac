"""The everyday matrix: what every public verb of every face does in every everyday situation.

One row a verb; a face that has a verb of that name (found by introspection) has its row. A row says how the verb is
called and what it answers: "ok", or the code of the error, by situation. What is not said is "ok", "wrong_kind" on a
group of another kind, and "no_space" for what writes under a full disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from logyard.machines.log.command import APPEND

OK = "ok"
SITUATIONS: Mapping[str, str] = {
    "first": "the first thing that a client does",
    "expired": "idle past its session's time to live: all its sessions have ended",
    "asleep": "idle past hibernation: all groups sleep",
    "leader": "every group has another leader than it had",
    "restarted": "all nodes were killed and started again",
    "cut": "all connections were cut",
    "anew": "every group was deleted, and made anew under its name",
    "full": "the disks of all nodes are full",
    "largest": "the largest arguments",
    "empty": "empty arguments",
    "kind": "the name is of a group of another kind",
}


GATEWAY = {"wrong_kind": "2", "no_space": "8"}
"""As codes of the gateway."""


class Row(NamedTuple):
    """How a verb is called, and what it answers.

    `call`: of a `Face`, whose handles it has; `kind`: of group that it is for ("": any); `usual`: what it answers, and
    `expect`: what else, by situation, by face, or by face and situation ("sync_full").
    """

    call: Callable[[Any], Any]
    kind: str = ""
    writes: bool = False
    expect: Mapping[str, str] = {}
    usual: str = OK

    def expected(self, face: str, situation: str) -> str:
        """What it answers."""
        usual = self.usual
        if situation == "kind" and self.kind:
            usual = "wrong_kind"
        if situation == "full" and self.writes:
            usual = "no_space"
        usual = self.expect.get(face, usual)
        found = self.expect.get(f"{face}_{situation}", self.expect.get(situation, usual))
        return GATEWAY.get(found, found) if face == "gateway" else found


def log(call: Callable[[Any], Any], *, writes: bool = False, **expect: str) -> Row:
    """A verb of an append log."""
    return Row(call, "log", writes, expect)


def kv(call: Callable[[Any], Any], *, writes: bool = False, **expect: str) -> Row:
    """A verb of a KV group."""
    return Row(call, "kv", writes, expect)


def queue(call: Callable[[Any], Any], *, writes: bool = False, **expect: str) -> Row:
    """A verb of a queue."""
    return Row(call, "queue", writes, expect)


def own(call: Callable[[Any], Any], *, writes: bool = False, **expect: str) -> Row:
    """A verb of a machine of one's own."""
    return Row(call, "own", writes, expect)


def held(call: Callable[[Any], Any], *, writes: bool = True, **expect: str) -> Row:
    """A verb of a consumer or session that was open before, and is of no more use when its session has ended."""
    gone = {"expired": "session_expired", "anew": "session_expired"}
    return Row(call, "queue", writes, gone | expect)


def either(call: Callable[[Any], Any], *, writes: bool = False, usual: str = OK, **expect: str) -> Row:
    """A verb for groups of every kind, or for none."""
    return Row(call, "", writes, expect, usual)


def topic(call: Callable[[Any], Any], *, usual: str = OK, **expect: str) -> Row:
    """A verb of a topic, or of who reads it: what is behind it is made, so on a full disk there is nothing to ask."""
    return Row(call, "", True, expect, usual)


BAD = "bad_request"
SEEN = "unknown_group"
"""Inside its own process a session sees that its group is gone, and not only that another one has the name."""
NO_LEASE = "lease_not_found"

ROWS: Mapping[str, Row] = {
    # Append logs
    "Log.append": log(lambda f: f.log.append(f.metadata, f.body), writes=True),
    "Log.append_many": log(lambda f: f.log.append_many(f.records), writes=True, empty=BAD),
    "Log.append_nowait": log(lambda f: f.log.append_nowait(f.metadata, f.small), writes=True),
    "Log.append_stream": log(lambda f: f.log.append_stream(f.metadata, f.stream()), writes=True),
    "Log.producer": log(lambda f: f.log.producer(f.name)),
    "Log.epoch": log(lambda f: f.log.epoch(f.name, 1, f.count)),
    "Log.close_epoch": log(lambda f: f.log.close_epoch(f.name, 1, f.count)),
    "Log.epoch_state": log(lambda f: f.log.epoch_state(f.name)),
    "Log.latest": log(lambda f: f.log.latest()),
    "Log.bounds": log(lambda f: f.log.bounds()),
    "Log.poll": log(lambda f: f.log.poll(0, max_records=f.count)),
    "Log.read": log(lambda f: f.log.read(f.offset), largest="out_of_range"),
    "Log.read_body": log(lambda f: f.log.read_body(0, 0, f.stop)),
    "Log.body_pieces": log(lambda f: f.log.body_pieces(0, 0, f.stop)),
    "Log.records": log(lambda f: f.log.records(0, f.count)),
    "Log.tail": log(lambda f: f.log.tail(follow=False, max_records=f.count)),
    "Log.seek": log(lambda f: f.log.seek(f.since)),
    "Log.retain": log(lambda f: f.log.retain(age=f.seconds, records=f.count)),
    "Log.truncate": log(lambda f: f.log.truncate(f.offset), largest="out_of_range"),
    "Log.query": either(lambda f: f.log.query(f.question)),
    "Log.wait_applied": either(lambda f: f.log.wait_applied(f.index, timeout=f.patience), largest="busy"),
    "Log.describe": either(lambda f: f.log.describe()),
    "Log.snapshot": either(lambda f: f.log.snapshot()),
    "Log.run": log(lambda f: f.log.run(f.latest_call())),
    "Log.command": either(lambda f: f.log.command(f.append, f.small), writes=True),
    "Producer.append": log(lambda f: f.producer.append(f.metadata, f.small), writes=True),
    "Producer.append_many": log(lambda f: f.producer.append_many(f.records), writes=True, empty=BAD),
    "EpochWriter.append": log(lambda f: f.epoch.append(f.metadata, f.small), writes=True),
    "EpochWriter.append_many": log(lambda f: f.epoch.append_many(f.records), writes=True, empty=BAD),
    # KV groups
    "KV.put": kv(lambda f: f.kv.put(f.key, f.value), writes=True, empty=BAD),
    "KV.get": kv(lambda f: f.kv.get(f.key), empty=BAD),
    "KV.range": kv(lambda f: f.kv.range(f.key, prefix=True, limit=f.count)),
    "KV.count": kv(lambda f: f.kv.count(f.key, prefix=True)),
    "KV.txn": kv(lambda f: f.kv.txn(f.compares, f.operations), writes=True),
    "KV.delete": kv(lambda f: f.kv.delete(f.key), writes=True, empty=BAD),
    "KV.grant": kv(lambda f: f.kv.grant(f.seconds), writes=True, empty=BAD),
    "KV.keep_alive": kv(lambda f: f.kv.keep_alive(f.lease), writes=True, largest=NO_LEASE, empty=NO_LEASE),
    "KV.time_to_live": kv(lambda f: f.kv.time_to_live(f.lease, keys=True), largest=NO_LEASE, empty=NO_LEASE),
    "KV.leases": kv(lambda f: f.kv.leases()),
    "KV.revoke": kv(lambda f: f.kv.revoke(f.lease), writes=True, largest=NO_LEASE, empty=NO_LEASE),
    "KV.status": kv(lambda f: f.kv.status()),
    "KV.compact": kv(lambda f: f.kv.compact(f.revision), writes=True, largest="future_revision", empty="compacted"),
    "KV.watch": kv(lambda f: f.kv.watch(f.key, prefix=True, start=f.first_revision)),
    "Watch.created": kv(lambda f: f.watched()),
    # Queues
    "Queue.publish": queue(lambda f: f.queue.publish(f.body, metadata=f.metadata), writes=True),
    "Queue.publish_many": queue(lambda f: f.queue.publish_many(f.records), writes=True, empty=BAD),
    "Queue.publish_nowait": queue(lambda f: f.queue.publish_nowait(f.small, metadata=f.metadata), writes=True),
    "Queue.cancel": queue(lambda f: f.queue.cancel(*f.ids), writes=True, empty=BAD),
    "Queue.stats": queue(lambda f: f.queue.stats()),
    "Queue.consume": queue(lambda f: f.queue.consume(prefetch=1), writes=True),
    "Queue.purge": queue(lambda f: f.queue.purge(ready=False, dead=True), writes=True),
    "Consumer.get": held(lambda f: f.consumer.get(f.patience), writes=False, expired=OK, anew=OK),
    "Consumer.ack": held(lambda f: f.consumer.ack(f.message()), embedded_anew=SEEN),
    "Consumer.ack_nowait": held(lambda f: f.consumer.ack_nowait(f.message()), writes=False, expired=OK, anew=OK),
    "Consumer.nack": held(lambda f: f.consumer.nack(f.message()), embedded_anew=SEEN),
    "Consumer.reject": held(lambda f: f.consumer.reject(f.message()), embedded_anew=SEEN),
    "Consumer.extend": held(lambda f: f.consumer.extend(f.message())),
    "Consumer.credit": held(lambda f: f.consumer.credit(f.credit)),
    "Consumer.flush": held(lambda f: f.consumer.flush(), embedded_anew=SEEN),
    "Consumer.close": held(lambda f: f.consumer.close(), writes=False, expired=OK, anew=OK),
    # Sessions of any machine
    "Yard.open_session": log(lambda f: f.yard.open_session(f.name_of("log"), kind="log")),
    "Session.command": held(lambda f: f.session.command(f.append, f.small, metadata=f.metadata)),
    "Session.messages": held(lambda f: f.first_message(), writes=False, embedded_anew=SEEN),
    "Session.close": held(lambda f: f.session.close(), writes=False, expired=OK, anew=OK),
    # Topics, each made when it is first asked for; consumer groups
    "Topic.send": topic(lambda f: f.topic.send(f.key, b"m", f.small), largest=BAD),
    "Topic.send_many": topic(lambda f: f.topic.send_many([(b"k", *one) for one in f.records])),
    "Topic.producer": topic(lambda f: f.topic.producer(f.name)),
    "Topic.describe": topic(lambda f: f.topic.describe()),
    "Topic.create": topic(lambda f: f.topic.create(2)),
    "Topic.grow": topic(lambda f: f.topic.grow(2)),
    "Topic.shrink": topic(lambda f: f.topic.shrink(1)),
    "Topic.alter": topic(lambda f: f.topic.alter(2)),
    "Topic.finish": topic(lambda f: f.topic.finish()),
    "Topic.retire": topic(lambda f: f.topic.retire()),
    "Topic.retain": topic(lambda f: f.topic.retain(age=f.seconds, records=f.count)),
    "Topic.purge": topic(lambda f: f.topic.purge()),
    "Topic.delete": topic(lambda f: f.yard.topic(f.fresh()).delete(), usual="unknown_topic"),
    "TopicProducer.send": topic(lambda f: f.topic_producer.send(f.key, b"m", f.small), largest=BAD),
    "GroupConsumer.get": topic(lambda f: f.group_consumer.get(f.patience)),
    "GroupConsumer.commit": topic(lambda f: f.group_consumer.commit()),
    "GroupConsumer.close": topic(lambda f: f.group_consumer.close()),
    "ConsumerGroup.describe": topic(lambda f: f.consumer_group.describe()),
    "ConsumerGroup.reset": topic(lambda f: f.consumer_group.reset(f.topic_name, "latest")),
    "ConsumerGroup.delete": topic(lambda f: f.consumer_group.delete()),
    "Yard.topic": either(lambda f: f.yard.topic(f.topic_name)),
    "Yard.topics": either(lambda f: f.yard.topics()),
    "Yard.consume": either(lambda f: f.yard.consume(f.topic_name, group=f.name)),
    "Yard.consumer_group": either(lambda f: f.yard.consumer_group(f.name)),
    "Yard.consumer_groups": either(lambda f: f.yard.consumer_groups()),
    # Administration, of both clients
    "Yard.log": either(lambda f: f.yard.log(f.name_of("log"))),
    "Yard.kv": either(lambda f: f.yard.kv(f.name_of("kv"))),
    "Yard.queue": either(lambda f: f.yard.queue(f.name_of("queue"))),
    "Yard.machine": either(lambda f: f.yard.machine(f.name_of("log"))),
    "Machine.command": either(lambda f: f.any_group.command(APPEND, f.small, metadata=f.metadata), writes=True),
    "Machine.query": either(lambda f: f.any_group.query(f.question)),
    "Machine.describe": either(lambda f: f.any_group.describe()),
    "Machine.open_session": either(lambda f: f.any_group.open_session(), writes=False),
    "Yard.nodes": either(lambda f: f.yard.nodes()),
    "Yard.cluster": either(lambda f: f.yard.cluster()),
    "Yard.create": either(lambda f: f.yard.create(f.fresh(), **f.options)),
    "Yard.create_many": either(lambda f: f.yard.create_many([f.fresh() for _ in range(f.few)])),
    "Yard.create_batch": either(lambda f: f.yard.create_batch([f.fresh() for _ in range(f.few)])),
    "Yard.list": either(lambda f: f.yard.list()),
    "Yard.describe": either(lambda f: f.yard.describe(f.name_of("log"))),
    "Yard.leader_view": either(lambda f: f.yard.leader_view(f.name_of("log"))),
    "Yard.locate": either(lambda f: f.yard.locate(f.name_of("log"))),
    "Yard.members": either(lambda f: f.yard.members(f.name_of("log"))),
    "Yard.leaders": either(lambda f: f.yard.leaders()),
    "Yard.board": either(lambda f: f.yard.board(1)),
    "Yard.key_metrics": either(lambda f: f.yard.key_metrics(f.some_names, 1)),
    "Yard.status": either(lambda f: f.yard.status()),
    "Yard.statuses": either(lambda f: f.yard.statuses()),
    "Yard.snapshot": either(lambda f: f.yard.snapshot(f.some_names)),
    "Yard.compact": either(lambda f: f.yard.compact(f.other_node)),
    "Yard.scrub": either(lambda f: f.yard.scrub()),
    "Yard.transfer": either(lambda f: f.yard.transfer(f.name_of("log"), f.follower())),
    "Yard.campaign": either(lambda f: f.yard.campaign(f.name_of("log"), 1)),
    "Yard.add_member": either(lambda f: f.yard.add_member(f.spare, 3), embedded=BAD),
    "Yard.remove_member": either(lambda f: f.yard.remove_member(f.spare, 3), embedded="refused"),
    "Yard.change_members": either(
        lambda f: f.yard.change_members(f.spare, f.changes), empty="refused", largest=BAD, embedded=BAD
    ),
    "Yard.forget_node": either(lambda f: f.yard.forget_node(2, 1), usual="refused", embedded=BAD),
    # These clusters have no catalogue: tests/service/catalog has those that do.
    "Yard.catalog": either(
        lambda f: f.yard.catalog("nodes", "list"), usual="refused", largest="refused", empty="refused"
    ),
    "Yard.change_catalog": either(
        lambda f: f.yard.change_catalog("plan", "pause", {}), usual="refused", largest="refused", empty="refused"
    ),
    "Yard.join": either(
        lambda f: f.yard.join(b"token", 1, "a:1", "b:1"), usual="refused", largest="refused", empty="refused"
    ),
    "Yard.skip": either(lambda f: f.yard.skip(f.name_of("log"), 1, 0), usual="refused"),
    "Yard.force_shrink": either(lambda f: f.yard.force_shrink(f.spare, 1)),
    "Yard.delete": either(lambda f: f.yard.delete(f.spare)),
    "Yard.drain": either(lambda f: f.yard.drain()),
    "Yard.close": either(lambda f: f.close()),
    # A system of one's own process
    "Yard.start_group": either(lambda f: f.yard.start_group(f.fresh(), f.machine())),
    "Yard.groups": either(lambda f: f.yard.groups()),
    "Yard.leaderboard": either(lambda f: f.yard.leaderboard()),
    "Yard.delete_group": either(lambda f: f.yard.delete_group(f.another)),
    # The small store
    "KVStore.kvconnect": either(lambda f: f.connect_store()),
    "KVStore.write": kv(lambda f: f.store.write(f.key, f.value), writes=True, empty=BAD),
    "KVStore.read": kv(lambda f: f.store.read(f.key), empty=BAD),
    "KVStore.exists": kv(lambda f: f.store.exists(f.key), empty=BAD),
    "KVStore.list": kv(lambda f: f.store.list(f.key)),
    "KVStore.watch": kv(lambda f: f.store_watch()),
    "KVStore.kvread": kv(lambda f: f.told(f.store.kvread(f.key)), empty="False", kind="False"),
    "KVStore.kvwrite": kv(lambda f: f.told(f.store.kvwrite(f.key, f.value)), empty="False", kind="False", full="False"),
    "KVStore.kvwatch": kv(lambda f: f.store_kvwatch(), kind="False"),
    "KVStore.close": either(lambda f: f.close()),
}

INTERNAL: Mapping[str, frozenset[str]] = {
    "Yard": frozenset(
        (
            "ask",
            "clock",
            "command",
            "first_contact",
            "freed",
            "kick",
            "lane",
            "listen",
            "lost",
            "opened",
            "run",
            "serve",
            "spawn",
            "append",
            "beat",
            "begin_session",
            "end_session",
            "compresses",
            "room",
            "background",
            "first_of",
            "pause",
            "event",
            "wait_for",
            "to_its_end",
        )
    ),
    "KV": frozenset(("ask", "fail", "run")),
    "Consumer": frozenset(("command", "listen", "messages", "sent", "settling", "told", "send", "start")),
    "Producer": frozenset(("begin", "must_wait", "end")),
    "Session": frozenset(("listen",)),
    "Topic": frozenset(("produce",)),
    "TopicProducer": frozenset(("begin", "must_wait", "end")),
    "Watch": frozenset(("counts", "fail", "put", "reached", "take")),
}
"""Methods without an underscore that only other parts of the client call."""
