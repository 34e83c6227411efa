"""The stack under test: the shipped compose file, driven through the commands a person would type.

As a script, one such command: `python3 tests/compose/stack.py ps`."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPOSE = os.environ["COMPOSE"].split()
PROJECT = os.environ.get("E2E_PROJECT", "fencepost-e2e")
FILES = ["docker-compose.yml", *os.environ.get("E2E_OVERRIDES", "").split()]


class Failed(Exception):
    """Something was not as it must be."""


def run(*words, check=True, seconds=300):
    """The output of a command; its whole noise where it fails."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    if check and done.returncode:
        raise Failed(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def docker(*args, **options):
    return run("docker", *args, **options).stdout.strip()


def command(*args):
    files = [word for file in FILES for word in ("-f", file)]
    return [*COMPOSE, *files, "-p", PROJECT, "--project-directory", ".", *args]


def compose(*args, **options):
    return run(*command(*args), **options)


def cli(*args, check=True):
    """A command of fencepost, as the owner of the database."""
    return compose("run", "--rm", "--no-deps", "-T", "cli", *args, check=check)


def answer(*args, code=0):
    """What a command prints as JSON; it must end with this code."""
    done = cli("--json", *args, check=False)
    if done.returncode != code:
        raise Failed(f"fencepost {' '.join(args)} ended with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout)


def sql(text):
    """One value, asked inside the container of the database."""
    return docker("exec", one("postgres"), "psql", "-X", "-U", "postgres", "-d", "app", "-v", "ON_ERROR_STOP=1", "-Atqc", text)


def containers(service, everything=False):
    """Ids of a service's containers; only those that run, unless all are asked for. Those of `run` do not count."""
    labels = [f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}", "com.docker.compose.oneoff=False"]
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    return docker("ps", "-q", "--no-trunc", *(["-a"] if everything else []), *filters).split()


def one(service):
    found = containers(service)
    if not found:
        raise Failed(f"no container of {service} runs")
    return found[0]


def inspect(container):
    return json.loads(docker("inspect", container))[0]


def healthy(service, count=1):
    found = containers(service)
    return len(found) == count and all(inspect(c)["State"].get("Health", {}).get("Status") == "healthy" for c in found)


def eventually(what, look, seconds=180):
    """Waits until `look` gives something true, and gives it back."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            seen = look()
        except Failed as error:
            seen, why = None, f" ({error})"
        else:
            why = f" (last seen: {seen!r})"
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise Failed(f"waited {seconds} s in vain until {what}{why}")
        time.sleep(0.5)


def crash(container):
    """SIGKILL from outside the engine, as when the kernel ends it: the engine's restart policy answers for it."""
    before = eventually("it runs", lambda: (now := inspect(container))["State"]["Pid"] and now)
    # Never 0, which would be ourselves.
    os.kill(before["State"]["Pid"], 9)
    eventually(
        "the engine restarts what crashed",
        lambda: (now := inspect(container))["RestartCount"] > before["RestartCount"] and now["State"]["Running"],
    )


class Cut:
    """A container off the network, as long as the block lasts."""

    def __init__(self, service, container):
        self.service, self.container, self.network = service, container, f"{PROJECT}_default"

    def __enter__(self):
        docker("network", "disconnect", "-f", self.network, self.container)
        if self.network in inspect(self.container)["NetworkSettings"]["Networks"]:
            raise Failed("the network was not cut")

    def __exit__(self, *_):
        docker("network", "connect", "--alias", self.service, self.network, self.container)


class Locked:
    """A table that nobody can write to, as long as the block lasts."""

    def __init__(self, table):
        self.lock = f"begin; lock table {table} in share mode"

    def __enter__(self):
        words = ["docker", "exec", one("postgres"), "psql", "-X", "-U", "postgres", "-d", "app", "-c", f"{self.lock}; select pg_sleep(600)"]
        self.holder = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __exit__(self, *_):
        sql(f"select pg_terminate_backend(pid) from pg_stat_activity where query like '{self.lock};%' and pid <> pg_backend_pid()")
        self.holder.wait()


if __name__ == "__main__":
    sys.exit(subprocess.run(command(*sys.argv[1:]), cwd=ROOT).returncode)
