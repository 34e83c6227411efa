"""Work goes on while containers are killed, paused and cut off, servers restarted and replicas scaled. At the end the
consumers' ledgers agree with the outbox. Each fault is seen to have happened. run.sh sets this up.

With the word `start` there are no faults and no work but what `up` brings."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from json import loads
from urllib.parse import urlencode

import stack
from stack import Cut, Failed, Locked, answer, cli, compose, containers, crash, docker, eventually, healthy, inspect, one, sql

SHARDS = 8


class Load(threading.Thread):
    """Submits tasks from a container, again and again, until it is stopped."""

    def __init__(self):
        super().__init__(daemon=True)
        self.stopped, self.submitted, self.refused = threading.Event(), 0, 0

    def run(self):
        while not self.stopped.wait(2):
            done = compose("run", "--rm", "--no-deps", "-T", "submit", "--tasks", "50", check=False)
            if done.returncode:
                # A database that restarts refuses: whether the transaction committed is for the ledgers to say.
                self.refused += 1
            else:
                self.submitted += 50

    def stop(self):
        self.stopped.set()
        self.join()


def holders():
    """How many shards each relay holds, by leases that have not run out."""
    rows = sql(
        "select relay, count(*) from fencepost.shards where lease_expires_at > clock_timestamp() group by relay order by 2"
    ).split()
    return [int(row.split("|")[1]) for row in rows]


def shared_by(*shares):
    return eventually(f"{len(shares)} relays share the shards as {shares}", lambda: holders() == list(shares))


def settled():
    return int(sql("select count(*) from fencepost.ledger"))


def progress(what):
    """Deliveries go on ending."""
    before = settled()
    eventually(f"deliveries go on: {what}", lambda: settled() > before)


def everything_is_up():
    compose("up", "-d", "--no-build", seconds=600)
    eventually("the relays are ready", lambda: healthy("relay", 2))
    eventually("the consumer is ready", lambda: healthy("http-consumer"))
    for service in ("secrets", "migrate", "submit"):
        (container,) = containers(service, everything=True)
        eventually(f"{service} has ended", lambda: inspect(container)["State"]["Status"] == "exited")
        if inspect(container)["State"]["ExitCode"]:
            raise Failed(docker("logs", container))
    if "consumer applied" in compose("logs", "relay").stdout:
        raise Failed("a relay had to declare the consumers: what was committed before it went to nobody")
    shared_by(4, 4)
    # Not `progress`: they may all have ended by now.
    eventually("the tasks that `up` submits are delivered", lambda: settled() > 0)


def closed(service):
    """Ports on loopback only, limits, and no secret in the environment."""
    state = inspect(one(service))
    for bindings in (state["NetworkSettings"]["Ports"] or {}).values():
        for binding in bindings or []:
            if binding["HostIp"] != "127.0.0.1":
                raise Failed(f"{service} publishes a port on {binding['HostIp']}")
    if not state["HostConfig"]["Memory"] or not state["HostConfig"]["NanoCpus"]:
        raise Failed(f"{service} has no limits")
    if any("PASSWORD=" in word or "postgresql://" in word for word in state["Config"]["Env"]):
        raise Failed(f"{service} has a secret in its environment")


def it_is_closed():
    """Nobody is root, and a service sees its own secrets and no others."""
    for service in ("postgres", "rabbitmq", "relay", "worker", "http-consumer", "amqp-consumer"):
        closed(service)
    if docker("exec", one("relay"), "id", "-u") != "10001":
        raise Failed("the relay runs as root")
    if docker("exec", one("worker"), "ls", "/run/secrets").split() != ["broker-url", "database-url"]:
        raise Failed("the worker sees more than its own secret")


def a_relay_crashes():
    relay = one("relay")
    crash(relay)
    shared_by(4, 4)
    progress("after a relay crashed")


def a_relay_is_paused():
    """Longer than its lease: another takes its shards, and when it wakes it does not act on what it held."""
    relay = one("relay")
    docker("pause", relay)
    shared_by(SHARDS)
    progress("while a relay is paused")
    docker("unpause", relay)
    shared_by(4, 4)


def a_relay_is_cut_off():
    relay = one("relay")
    with Cut("relay", relay):
        shared_by(SHARDS)
        progress("while a relay is cut off")
    shared_by(4, 4)


def the_consumer_is_cut_off():
    consumer = one("http-consumer")
    waiting = "select count(*) from fencepost.parked where state = 'retry'"
    with Cut("http-consumer", consumer):
        eventually("deliveries wait for the consumer", lambda: int(sql(waiting)) > 0)
        received = "select count(*) from fencepost_demo_shared.receipts where consumer <> 'demo-shipping'"
        before = sql(received)
        time.sleep(2)
        if sql(received) != before:
            raise Failed("the consumer was reached although it is cut off")
    progress("the consumer is back")


def the_consumer_crashes():
    crash(one("http-consumer"))
    eventually("the consumer is ready again", lambda: healthy("http-consumer"))
    progress("after the consumer crashed")


def the_consumer_is_paused():
    consumer = one("http-consumer")
    ambiguous = "select count(*) from fencepost.attempts where token = 'ambiguous'"
    before = int(sql(ambiguous))
    docker("pause", consumer)
    eventually("attempts end without an answer", lambda: int(sql(ambiguous)) > before)
    docker("unpause", consumer)
    progress("after the consumer was paused")


def a_worker_crashes():
    """What it held is claimed again under a new epoch."""
    crash(one("worker"))
    progress("after the workers crashed")


def the_workers_are_paused():
    worker = one("worker")
    lost = "select count(*) from fencepost.tasks where status = 'running' and lease_expires_at < clock_timestamp()"
    # Before the pause: Compose v2 would start the paused one anew.
    compose("up", "-d", "--no-build", "--no-deps", "--no-recreate", "--scale", "worker=2", "worker")
    eventually("a second pool works", lambda: len(containers("worker")) == 2)
    docker("pause", worker)
    eventually("the leases of the paused ones are taken over", lambda: int(sql(lost)) == 0)
    docker("unpause", worker)
    progress("with two pools of workers")
    compose("up", "-d", "--no-build", "--no-deps", "--no-recreate", "--scale", "worker=1", "worker")


def scale(relays):
    compose("up", "-d", "--no-build", "--no-deps", "--no-recreate", "--scale", f"relay={relays}", "relay")


def replicas_come_and_go():
    scale(4)
    shared_by(2, 2, 2, 2)
    scale(1)
    shared_by(8)
    progress("with one relay")
    scale(2)
    shared_by(4, 4)


def postgres_is_restarted():
    started = "select pg_postmaster_start_time()"
    before = sql(started)
    docker("restart", "-t", "10", one("postgres"))
    if eventually("the database answers", lambda: sql(started)) == before:
        raise Failed("the database was not restarted")
    shared_by(4, 4)
    progress("after the database restarted")


def postgres_crashes():
    """With what its memory held: it recovers from its log."""
    started = "select pg_postmaster_start_time()"
    before = sql(started)
    crash(one("postgres"))
    if eventually("the database answers", lambda: sql(started)) == before:
        raise Failed("the database did not crash")
    if "automatic recovery" not in compose("logs", "postgres").stdout:
        raise Failed("the database ended in an orderly way")
    shared_by(4, 4)
    progress("after the database crashed")


def the_amqp_consumer_crashes():
    """With messages in its hands, received and not yet applied: the broker hands them out again."""
    consumer = one("amqp-consumer")
    address = inspect(consumer)["NetworkSettings"]["Networks"][f"{stack.PROJECT}_default"]["IPAddress"]
    held = f"select count(*) from pg_stat_activity where wait_event_type = 'Lock' and client_addr = '{address}'"
    again = "select count(*) - count(distinct key) from fencepost_demo_shared.receipts where consumer = 'demo-shipping'"
    before = int(sql(again))
    with Locked("fencepost_demo_shared.applied"):
        eventually("it has a message in its hands", lambda: int(sql(held)) > 0)
        crash(consumer)
    eventually("a message is handed out again", lambda: int(sql(again)) > before)
    progress("after the AMQP consumer crashed")


SHIPPED = "select count(*) from fencepost.ledger l join fencepost.consumers c using (consumer_id) where c.name = 'demo-shipping'"


def the_broker_is_cut_off():
    with Cut("rabbitmq", one("rabbitmq")):
        # What had come in already is written down.
        time.sleep(2)
        before = sql(SHIPPED)
        progress("over HTTP, without a broker")
        if sql(SHIPPED) != before:
            raise Failed("the broker was reached although it is cut off")
    eventually("messages flow again", lambda: sql(SHIPPED) != before)


def rabbitmq_is_restarted():
    before = inspect(one("rabbitmq"))["State"]["StartedAt"]
    docker("restart", "-t", "20", one("rabbitmq"))
    eventually("the broker is ready", lambda: healthy("rabbitmq"))
    if inspect(one("rabbitmq"))["State"]["StartedAt"] == before:
        raise Failed("the broker was not restarted")
    before = sql(SHIPPED)
    eventually("messages flow again", lambda: sql(SHIPPED) != before)


def prometheus_sees_the_relays():
    compose("--profile", "monitoring", "up", "-d", "--no-build", "--no-deps", "prometheus")
    closed("prometheus")
    eventually("Prometheus is ready", lambda: healthy("prometheus"))
    port = os.environ["PROMETHEUS_PORT"]

    def ask(path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=5) as response:
                return loads(response.read())["data"]
        except OSError:
            return None

    def targets():
        active = (ask("targets") or {}).get("activeTargets", [])
        return [target["health"] for target in active] == ["up", "up"]

    eventually("Prometheus scrapes both relays", targets)
    eventually("a gauge is there", lambda: (ask("query?query=fencepost_database_up") or {}).get("result"))
    (group,) = ask("rules")["groups"]
    if len(group["rules"]) < 5 or any(rule["health"] == "err" for rule in group["rules"]):
        raise Failed(f"the alert rules do not work: {group}")
    panels = loads((stack.ROOT / "deploy/grafana/dashboards/fencepost.json").read_text())["panels"]
    for expr in (target["expr"] for panel in panels for target in panel["targets"]):
        look = f"query?{urlencode({'query': expr})}"
        if "rate(" in expr:
            eventually(f"the dashboard has something to show for {expr}", lambda: (ask(look) or {}).get("result"))
        elif ask(look) is None:
            raise Failed(f"Prometheus does not take the dashboard's {expr}")


def the_ledgers_agree():
    drained = answer("wait", "--until-drained", "--tasks", "--timeout", "180s")
    # What the broker confirmed has ended for fencepost, and is with its consumer a moment later.
    check = eventually("the consumers' ledgers have it all", lambda: answer("demo", "--role", "check"), seconds=60)
    proof = answer("audit")
    ended = sum(proof["ended"].values())
    print(f"  drained after {drained['seconds']:.1f} s; {check}", flush=True)
    print(f"  ended {proof['ended']}, attempts {proof['attempts']}, completions {proof['completions']}", flush=True)
    if ended != check["promised"] or proof["waiting"]:
        raise Failed(f"the outbox has {ended} deliveries, the producers promised {check['promised']}")
    # Not its exit code: relays that crashed have not said goodbye, and stand there for a day.
    status = loads(cli("--json", "status", check=False).stdout)
    stuck = [edge["name"] for edge in status["edges"] if {"dead", "in_doubt"} & edge["waiting"].keys()]
    if stuck or status["alarms"]:
        raise Failed(f"something needs a person: {stuck} {status['alarms']}")
    return proof


def the_ledgers_agree_after_all(load):
    load.stop()
    print(f"  {load.submitted} tasks were submitted; {load.refused} goes were refused", flush=True)
    if load.submitted < 500:
        raise Failed("too little work was done for the faults to hit any")
    # How many attempts a crash hits is chance; that each fault happened, its step has seen.
    if not the_ledgers_agree()["attempts"].get("ambiguous"):
        raise Failed("no attempt is known to be ambiguous, although a consumer was paused amid them")


def the_audit_finds_a_hole():
    """So that the agreement above means something: one fact is taken away behind everybody's back."""
    key = sql(
        "begin; set local session_replication_role = replica; with gone as (delete from fencepost.ledger where (effect_id, consumer_id, token) = "
        "(select effect_id, consumer_id, token from fencepost.ledger l where not exists (select from fencepost.attempts a where a.effect_id = l.effect_id) "
        "limit 1) returning effect_id) select e.task_id || ':' || e.lease_epoch from gone join fencepost.effects e on e.id = gone.effect_id; commit"
    )
    proof = answer("audit", code=1)
    if [hole["kind"] for hole in proof["holes"]] != ["delivery_without_end"] or not proof["holes"][0]["object"].startswith(key):
        raise Failed(f"the audit names {proof['holes']}, and not {key}")


def down(check=True):
    compose("--profile", "monitoring", "down", "-v", "--remove-orphans", "-t", "5", check=check)


def everything_is_gone():
    down()
    label = f"label=com.docker.compose.project={stack.PROJECT}"
    for kind, listed in (("container", ["ps", "-a"]), ("volume", ["volume", "ls"]), ("network", ["network", "ls"])):
        left = docker(*listed, "-q", "--filter", label)
        if left:
            raise Failed(f"`down -v` left a {kind}: {left}")


FAULTS = [
    a_relay_crashes,
    the_consumer_is_cut_off,
    a_worker_crashes,
    a_relay_is_paused,
    the_workers_are_paused,
    postgres_is_restarted,
    a_relay_is_cut_off,
    the_consumer_crashes,
    rabbitmq_is_restarted,
    the_amqp_consumer_crashes,
    the_broker_is_cut_off,
    the_consumer_is_paused,
    postgres_crashes,
    replicas_come_and_go,
]


def main():
    # Ended from outside, it still takes its containers away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("POSTGRES_PORT", "55439")
    os.environ.setdefault("PROMETHEUS_PORT", "59090")
    compose("down", "-v", "--remove-orphans")
    steps = []

    def step(name, action, *args):
        started = time.monotonic()
        print(f"e2e: {name} ...", flush=True)
        action(*args)
        steps.append(name)
        print(f"e2e: {name}: ok, {time.monotonic() - started:.1f} s", flush=True)

    load = Load()
    try:
        step("everything is up", everything_is_up)
        step("it is closed", it_is_closed)
        if sys.argv[1:] == ["start"]:
            step("the ledgers agree", the_ledgers_agree)
        else:
            load.start()
            for fault in FAULTS:
                step(fault.__name__.replace("_", " "), fault)
            step("prometheus sees the relays", prometheus_sees_the_relays)
            step("the ledgers agree", the_ledgers_agree_after_all, load)
            step("the audit finds a hole", the_audit_finds_a_hole)
        if not os.environ.get("E2E_KEEP"):
            step("everything is gone", everything_is_gone)
    except (Failed, subprocess.TimeoutExpired) as error:
        load.stopped.set()
        print(f"e2e: {error}", flush=True)
        print(compose("logs", "--tail", "25", check=False).stdout)
        print(cli("status", check=False).stdout)
        return 1
    finally:
        if not os.environ.get("E2E_KEEP"):
            load.stop() if load.is_alive() else None
            down(check=False)
    print(f"e2e: {len(steps)} steps, all ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
