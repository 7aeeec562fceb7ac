"""Ra, driven directly: the libraries of Debian's rabbitmq-server, a machine that does nothing but let go of what need
not be kept, and a load inside the leader's own virtual machine, as its users have it (no socket between client and
leader, so it has no CPU of its own).

Nodes are Erlang nodes over loopback with a name server (epmd) of their own; all end by their ids.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..histogram import Histogram
from .load import accepts, free_ports
from .peer import Load, Peer, PeerFailed, PeerSpec, said_by

PLUGINS = "/usr/lib/rabbitmq/lib"
NEEDED = ("ra", "aten", "gen_batch_server", "seshat")
DONE_S = 120.0
SOURCE = r"""
-module(bench_load).
-behaviour(ra_machine).
-export([init/1, apply/3, node/1, load/1, drive/6, client/7]).

%% How many commands came, and how many of the last ones stay in the log (0: all).
init(#{keep := Keep}) -> {0, Keep}.

apply(#{index := Index}, _Command, {Count, Keep}) ->
    State = {Count + 1, Keep},
    case Keep > 0 andalso Index > Keep andalso Index rem parts(Keep) =:= 0 of
        true -> {State, ok, [{release_cursor, Index - Keep, State}]};
        false -> {State, ok}
    end.

%% What goes, goes in eighths.
parts(Keep) -> max(1, Keep div 8).

%% A node: ra with its data below the directory, until it is killed.
node([Dir]) ->
    {ok, _} = ra:start_in(Dir),
    file:write_file(Dir ++ ".ready", <<"ready">>),
    receive stop -> ok end.

%% From a node of its own: form the groups, then load inside of the first node. Prints one term as JSON.
load([Nodes, Names, Clients, Window, Size, Warmup, Seconds, Keep]) ->
    Members = [list_to_atom(Node) || Node <- string:tokens(Nodes, ",")],
    [pong = net_adm:ping(Node) || Node <- Members],
    Logs = list_to_integer(Names),
    Groups = [list_to_atom("bench" ++ integer_to_list(At)) || At <- lists:seq(1, Logs)],
    [ok = form(Group, Members, list_to_integer(Keep)) || Group <- Groups],
    io:format("ready~n"),
    "go\n" = io:get_line(""),
    [C, W, S, Wu, Se] = [list_to_integer(V) || V <- [Clients, Window, Size, Warmup, Seconds]],
    {Counted, Acknowledged, Left, Worst, Buckets} =
        rpc:call(hd(Members), ?MODULE, drive, [Groups, C, W, S, Wu, Se]),
    Texts = [io_lib:format("[~b,~b]", [U, N]) || {U, N} <- Buckets],
    io:format("{\"counted\":~b,\"acknowledged\":~b,\"left\":~b,\"worst_us\":~b,\"us\":[~s]}~n",
              [Counted, Acknowledged, Left, Worst, lists:join(",", Texts)]),
    halt(0).

%% As ra:start_cluster/4 does, but for how often it may let go of its log.
form(Group, Members, Keep) ->
    Ids = [{Group, Node} || Node <- Members],
    More = case Keep of 0 -> #{}; _ -> #{snapshot_interval => parts(Keep)} end,
    Configs = [#{id => Id, uid => Uid, cluster_name => Group, log_init_args => More#{uid => Uid},
                 initial_members => Ids, machine => {module, ?MODULE, #{keep => Keep}}}
               || Id <- Ids, Uid <- [ra:new_uid(atom_to_binary(Group))]],
    {ok, _, _} = ra:start_cluster(default, Configs),
    ok = lead(hd(Ids), 100).

%% The first node leads every group, since the load is there.
lead(_, 0) -> not_led;
lead({_, Node} = First, Left) ->
    case ra:members(First) of
        {ok, _, First} -> ok;
        {ok, _, Leader} -> ra:transfer_leadership(Leader, First), timer:sleep(20), lead(First, Left - 1);
        _ -> timer:sleep(50), _ = Node, lead(First, Left - 1)
    end.

drive(Groups, Clients, Window, Size, Warmup, Seconds) ->
    Body = crypto_free(Size),
    Self = self(),
    From = erlang:monotonic_time(microsecond) + Warmup * 1000,
    Until = From + Seconds * 1000,
    Ids = list_to_tuple([{Group, node()} || Group <- Groups]),
    Pids = [spawn_link(?MODULE, client, [Self, Ids, At * size(Ids) div Clients, Window, Body, From, Until])
            || At <- lists:seq(0, Clients - 1)],
    Results = [receive {Pid, Result} -> Result end || Pid <- Pids],
    Sum = fun(At) -> lists:sum([element(At, R) || R <- Results]) end,
    Buckets = lists:foldl(fun(R, All) -> maps:fold(fun(K, V, M) -> M#{K => V + maps:get(K, M, 0)} end, All,
                                                   element(5, R)) end, #{}, Results),
    {Sum(1), Sum(2), Sum(3), lists:max([element(4, R) || R <- Results]), maps:to_list(Buckets)}.

crypto_free(Size) -> list_to_binary([rand:uniform(256) - 1 || _ <- lists:seq(1, Size)]).

client(Parent, Ids, At, 1, Body, From, Until) ->
    Parent ! {self(), alone(Ids, At, Body, From, Until, {0, 0, 0, 0, #{}})};
client(Parent, Ids, At, Window, Body, From, Until) ->
    Pending = submit(Ids, At, Window, Body, #{}),
    Parent ! {self(), piped(Ids, At + Window, Body, From, Until, Pending, {0, 0, 0, 0, #{}})}.

alone(Ids, At, Body, From, Until, Sum) ->
    Began = erlang:monotonic_time(microsecond),
    case Began >= Until of
        true -> Sum;
        false ->
            {ok, ok, _} = ra:process_command(element(At rem size(Ids) + 1, Ids), Body, 30000),
            Now = erlang:monotonic_time(microsecond),
            alone(Ids, At + 1, Body, From, Until, count(Began, Now, From, Until, Sum))
    end.

submit(_, _, 0, _, Pending) -> Pending;
submit(Ids, At, Count, Body, Pending) ->
    Ref = make_ref(),
    ok = ra:pipeline_command(element(At rem size(Ids) + 1, Ids), Body, Ref, normal),
    submit(Ids, At + 1, Count - 1, Body, Pending#{Ref => erlang:monotonic_time(microsecond)}).

piped(_, _, _, _, _, Pending, Sum) when map_size(Pending) =:= 0 -> Sum;
piped(Ids, At, Body, From, Until, Pending, Sum) ->
    receive
        {ra_event, _, {applied, Applied}} ->
            Now = erlang:monotonic_time(microsecond),
            {Rest, Next} = lists:foldl(
                fun({Ref, _}, {P, S}) ->
                    {Began, P1} = maps:take(Ref, P),
                    {P1, count(Began, Now, From, Until, S)}
                end, {Pending, Sum}, Applied),
            Count = case Now < Until of true -> length(Applied); false -> 0 end,
            piped(Ids, At + Count, Body, From, Until, submit(Ids, At, Count, Body, Rest), Next);
        {ra_event, _, {rejected, _}} ->
            exit(not_the_leader)
    after 30000 ->
        {C, A, _, W, B} = Sum,
        {C, A, map_size(Pending), W, B}
    end.

%% Buckets of about 3 %: microseconds with their five leading bits.
count(Began, Now, From, Until, {Counted, Acknowledged, Left, Worst, Buckets}) when Now >= From, Now < Until ->
    Us = Now - Began,
    Key = rounded(Us, 0),
    {Counted + 1, Acknowledged + 1, Left, max(Worst, Us), Buckets#{Key => maps:get(Key, Buckets, 0) + 1}};
count(_, _, _, _, {Counted, Acknowledged, Left, Worst, Buckets}) ->
    {Counted, Acknowledged + 1, Left, Worst, Buckets}.

rounded(Us, Shift) when Us < 64 -> Us bsl Shift;
rounded(Us, Shift) -> rounded(Us bsr 1, Shift + 1).
"""


def libraries() -> list[str]:
    """Return the folders of Ra and what it needs; raise OSError if one is missing."""
    found = []
    for name in NEEDED:
        places = sorted(Path(PLUGINS).glob(f"rabbitmq_server-*/plugins/{name}-*/ebin"))
        if not places:
            raise FileNotFoundError(2, "no such library", f"{PLUGINS}/.../{name}-*")
        found.append(str(places[-1]))
    return found


class Ra(Peer):
    """Erlang nodes with Ra."""

    name = "ra"
    install = "apt-get install rabbitmq-server erlang-base"
    notes = ("its load runs inside the leader, without a socket", "its machine does nothing but count")

    @classmethod
    def version(cls) -> str:
        """Return the version that its folder says."""
        if shutil.which("erlc") is None:
            return ""
        found = re.search(r"/ra-(\d[\d.]*)/", libraries()[0])
        return found[1] if found else ""

    def start(self) -> None:
        """Make the machine, start a name server and the nodes."""
        source = self.directory / "bench_load.erl"
        source.write_text(SOURCE, encoding="utf-8")
        said_by("erlc", "-pa", libraries()[0], "-o", str(self.directory), str(source))
        (port,) = free_ports(1)
        self.environment = {"ERL_EPMD_PORT": str(port), "ERL_EPMD_ADDRESS": "127.0.0.1", "HOME": str(self.directory)}
        self.cookie = secrets.token_hex(8)
        epmd = shutil.which("epmd") or "epmd"
        self.spawn([epmd, "-port", str(port), "-address", "127.0.0.1"], "epmd", self.environment)
        self.await_ready("epmd", lambda: accepts(f"127.0.0.1:{port}"))
        self.names = [f"n{at}b{port}@127.0.0.1" for at in range(self.nodes)]
        for at, name in enumerate(self.names):
            place = f'["{self.directory}/n{at}"]'
            self.spawn(
                [*self.words(name), "-noinput", "-eval", f"bench_load:node({place})."], f"n{at}", self.environment
            )
        ready = [self.directory / f"n{at}.ready" for at in range(self.nodes)]
        self.await_ready("Erlang nodes", lambda: all(path.exists() for path in ready))

    def words(self, name: str) -> list[str]:
        """Return what starts an Erlang node of that name."""
        return [
            "erl", "-name", name, "-setcookie", self.cookie, "-start_epmd", "false", "-kernel",
            "inet_dist_use_interface", "{127,0,0,1}", "-pa", str(self.directory), *libraries(),
        ]  # fmt: skip

    @property
    def addresses(self) -> list[str]:
        """Names of the Erlang nodes."""
        return self.names

    def drive(self, load: Load, specs: Sequence[PeerSpec], say: Callable[[str], None]) -> list[dict[str, Any]]:
        """Load from inside the leader; the node that asks for it ends with its answer."""
        if load.rate:
            raise PeerFailed("ra: its load is a closed loop, it has no rate")
        told = [
            ",".join(self.names), load.logs, load.clients, load.window, load.size, int(load.warmup_s * 1000),
            int(load.seconds * 1000), -(-load.keep // load.size),
        ]  # fmt: skip
        arguments = ",".join(f'"{one}"' for one in told)
        name = f"load{self.names[0]}"
        process = subprocess.Popen(
            [*self.words(name), "-noshell", "-hidden", "-eval", f"bench_load:load([{arguments}])."],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **self.environment}, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdin is not None and process.stdout is not None
            said = process.stdout.readline()
            if said != "ready\n":
                raise PeerFailed(f"ra: its load did not start: {said.strip()[:300]} {self.tail()}")
            process.stdin.write("go\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line.startswith("{"):
                raise PeerFailed(f"ra: its load ended early: {line.strip()[:300]}")
            return [self.counted(json.loads(line))]
        finally:
            process.kill()
            process.communicate()

    def counted(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return what it counted as our load processes say it."""
        histogram = Histogram()
        for microseconds, times in found["us"]:
            histogram.add(microseconds / 1e6, times)
        return {
            "counted": found["counted"], "acknowledged": found["acknowledged"], "failed": found["left"],
            "verified": 0, "lost": 0, "histogram": histogram.dump(), "problems": [], "cpu_s": 0.0,
        }  # fmt: skip


PEERS: dict[str, type[Peer]] = {"ra": Ra}
