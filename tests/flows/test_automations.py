"""Automations: as Prefect's own server parses them, and in action on a real one."""

import json
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

import pytest
from prefect.server.events.schemas.automations import AutomationCore
from prefect.server.events.schemas.events import ReceivedEvent
from support import ROOT, environment, get_json, starling, tiny_document, wait_until, write_config

from flows.deploy.automations import (
    CRASHED_MESSAGE,
    HEARTBEAT,
    MODEL_PAYLOAD,
    PREFIX,
    RUN_PAYLOAD,
    SILENCE_S,
    corpus_automation,
    heartbeat_automation,
    notifications,
)
from flows.deploy.deployments import DEPLOYED_TAG, SCHEDULED
from flows.names import TAG
from flows.servers.services import free_port, start_prefect
from tasks.config.pipeline import parse_config

DEPLOYED = [{"prefect.resource.id": f"prefect.tag.{DEPLOYED_TAG}", "prefect.resource.role": "tag"}]
TAGGED = [{"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}]


def event(name, resource, related=TAGGED, payload=None):
    labels = {"prefect.resource.id": resource} if isinstance(resource, str) else resource
    about = {"id": str(uuid4()), "occurred": datetime.now(UTC).isoformat(), "payload": payload or {}}
    return {"event": name, "resource": labels, "related": related, **about}


def of_run(name, run="0f9c6a3e-8a4f-4a43-9b4d-6d7f3e2c1a00", **labels):
    return {"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.resource.name": name, **labels}


def trigger_of(automation):
    return AutomationCore.model_validate(automation).trigger


def covers(automation, *given, **options):
    return trigger_of(automation).covers(ReceivedEvent.model_validate(event(*given, **options)))


def test_server_accepts_every_automation():
    config = parse_config(tiny_document())
    made = [heartbeat_automation(), corpus_automation(config, str(uuid4())), *notifications(str(uuid4()))]
    for automation in made:
        assert AutomationCore.model_validate(automation).name.startswith(PREFIX)
    assert len({automation["name"] for automation in made}) == len(made)


def test_only_our_own_runs_are_watched():
    other = [{"prefect.resource.id": "prefect.tag.nightly", "prefect.resource.role": "tag"}]
    watched = heartbeat_automation()
    assert covers(watched, HEARTBEAT, of_run("a"))
    assert not covers(watched, HEARTBEAT, of_run("a"), related=other)
    assert not covers(watched, HEARTBEAT, of_run("a"), related=[])
    trigger = trigger_of(watched)
    assert trigger.starts_after(HEARTBEAT)
    assert not trigger.starts_after("prefect.flow-run.Pending")
    for ending in ("Completed", "Suspended", "Skipped", "Cancelled"):
        assert trigger.expects(f"prefect.flow-run.{ending}")
    for going_on in ("Running", "Cancelling", "Pending", "Late"):  # they are not heartbeats
        assert not trigger.expects(f"prefect.flow-run.{going_on}")


def test_one_event_suffices_except_for_corpus_announcements():
    config = parse_config(tiny_document())
    made = [heartbeat_automation(), corpus_automation(config, str(uuid4())), *notifications(str(uuid4()))]
    triggers = [trigger_of(automation) for automation in made]
    assert [trigger.threshold for trigger in triggers] == [1, 1, 1, 1]
    assert [trigger.within.total_seconds() for trigger in triggers] == [SILENCE_S, 60, 60, 1]
    assert all(trigger.for_each == {"prefect.resource.id"} for trigger in triggers[2:])


def test_failures_and_crashes_notify_under_any_state_name():
    runs, models = notifications(str(uuid4()))
    for kind, name, told in [
        ("FAILED", "Failed", True),
        ("FAILED", "TimedOut", True),
        ("CRASHED", "Crashed", True),
        ("COMPLETED", "Completed", False),
        ("CANCELLED", "Skipped", False),
    ]:
        resource = of_run("a", **{"prefect.state-type": kind, "prefect.state-name": name})
        assert covers(runs, f"prefect.flow-run.{name}", resource, related=DEPLOYED) == told
        assert not covers(runs, f"prefect.flow-run.{name}", resource)  # nested, or of a terminal
    assert not covers(runs, HEARTBEAT, of_run("a"), related=DEPLOYED)
    model = {"prefect.resource.id": "starling.model.demo", "prefect.resource.name": "demo"}
    assert covers(models, "starling.promoted", model, related=[])
    assert not covers(models, "prefect.flow-run.Completed", of_run("a"))


@pytest.mark.parametrize("payload", [RUN_PAYLOAD, MODEL_PAYLOAD])
def test_webhook_gets_valid_json_for_any_message(payload):
    from prefect.server.events.actions import JinjaTemplateAction
    from prefect.server.utilities.user_templates import render_user_template_sync

    JinjaTemplateAction._register_filters_if_needed()
    labels = {"prefect.state-name": "Failed", "prefect.state-message": 'said "no"\n\tand {{ left }} é'}
    given = ReceivedEvent.model_validate(event("prefect.flow-run.Failed", of_run('a "b"', **labels), payload={"a": 1}))
    text = render_user_template_sync(payload, {"event": given, "flow_run": None})
    message = json.loads(text)
    assert set(message) == {"event", "text", "name", "state", "message", "url", "occurred"}
    assert message["name"] == 'a "b"'
    if payload is RUN_PAYLOAD:
        assert message["message"] == labels["prefect.state-message"]


class Hook:
    """A webhook that records requests."""

    def __init__(self):
        self.got = got = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/planted-hook-secret"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def named(self, name):
        return [body for _, body in list(self.got) if body["name"] == name]


class Live:
    """A real Prefect server with the deployments of a tiny configuration."""

    def __init__(self, home, folder):
        self.home, self.hook, self.port = home, Hook(), free_port()
        self.config = write_config(folder / "tiny.yaml", tiny_document())
        self.start()
        self.env = {"PREFECT_API_URL": self.api, "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore"}

    def start(self):
        with environment(PREFECT_API_URL=None, STARLING_HOME=self.home):
            self.service = start_prefect(self.port).wait()
        self.api = f"{self.service.url}/api"

    def starling(self, *words, **options):
        return starling(*words, home=self.home, **self.env, **options)

    def deploy(self, *words, **options):
        return self.starling("deploy", "--config", self.config, *words, **options)

    def automations(self):
        return {automation["name"]: automation for automation in get_json(f"{self.api}/automations/filter", {})}

    def make_run(self, name, state="RUNNING", tags=(TAG,)):
        flow = get_json(f"{self.api}/flows/", {"name": "pretended"})["id"]
        body = {"flow_id": flow, "name": name, "tags": list(tags), "state": {"type": state}}
        return get_json(f"{self.api}/flow_runs/", body)["id"]

    def state(self, run):
        state = get_json(f"{self.api}/flow_runs/{run}")["state"]
        return state["type"], state["message"]

    def set_state(self, run, kind, **more):
        return get_json(f"{self.api}/flow_runs/{run}/set_state", {"state": {"type": kind, **more}})

    def emit(self, *events):
        get_json(f"{self.api}/events", list(events))

    def beat(self, run, related=TAGGED):
        self.emit(event(HEARTBEAT, of_run("r", run), related))


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    server = Live(folder / "home", folder)
    yield server
    server.service.stop()
    server.hook.server.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_second_deployment_changes_nothing_and_keeps_paused_automations(live):
    first = live.deploy("--json", STARLING_NOTIFY_URL=live.hook.url)
    made = {entry["deployment"]: entry["id"] for entry in json.loads(first.stdout.splitlines()[-1])["deployments"]}
    assert list(made) == [f"{item.flow}/tiny" for item in SCHEDULED]
    before = live.automations()
    assert len(before) == 4
    nightly = get_json(f"{live.api}/deployments/{made['pipeline/tiny']}")
    assert nightly["parameters"]["config"]["name"] == "tiny"
    assert nightly["job_variables"]["env"] == {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    (schedule,) = nightly["schedules"]
    patch = ["-X", "PATCH", "-H", "Content-Type: application/json", "-d", '{"active": false}']
    url = f"{live.api}/deployments/{nightly['id']}/schedules/{schedule['id']}"
    subprocess.run(["curl", "-sf", *patch, url], check=True, timeout=240)
    again = live.deploy("--json")  # without the address, the existing one is kept
    assert {
        entry["deployment"]: entry["id"] for entry in json.loads(again.stdout.splitlines()[-1])["deployments"]
    } == made
    after = live.automations()
    assert {name: (automation["id"], automation["updated"]) for name, automation in after.items()} == {
        name: (automation["id"], automation["updated"]) for name, automation in before.items()
    }
    (schedule,) = get_json(f"{live.api}/deployments/{nightly['id']}")["schedules"]
    assert not schedule["active"]
    texts = [path.read_bytes() for path in live.home.rglob("*") if path.is_file()]
    texts += [f"{done.stdout}{done.stderr}".encode() for done in (first, again)]
    assert not any(b"planted-hook-secret" in text for text in texts)  # Prefect's database has it encrypted


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_webhook_is_notified_of_failures_crashes_and_champions(live):
    live.deploy(STARLING_NOTIFY_URL=live.hook.url)
    for name, tags in (("loud", [TAG, DEPLOYED_TAG]), ("part", [TAG]), ("foreign", [])):
        live.set_state(live.make_run(name, tags=tags), "FAILED", name="Failed", message='it said "no"')
    twice = event(
        "prefect.flow-run.Failed",
        of_run("twice", **{"prefect.state-type": "FAILED", "prefect.state-name": "Failed"}),
        related=DEPLOYED,
    )
    live.emit(twice)
    live.emit(twice | {"id": str(uuid4())})
    live.set_state(live.make_run("fine"), "COMPLETED", name="Completed")
    live.set_state(live.make_run("gone", tags=[TAG, DEPLOYED_TAG]), "CRASHED", name="Crashed", message="lost")
    model = {"prefect.resource.id": "starling.model.demo", "prefect.resource.name": "demo"}
    live.emit(event("starling.promoted", model, related=[], payload={"version": "3", "url": "http://x/3"}))
    for name in ("loud", "gone", "demo", "twice"):
        wait_until(lambda name=name: live.hook.named(name))
    (loud,) = live.hook.named("loud")
    assert (loud["state"], loud["message"]) == ("Failed", 'it said "no"')
    assert "/runs/flow-run/" in loud["url"]
    (demo,) = live.hook.named("demo")
    assert (demo["event"], demo["state"], demo["url"]) == ("starling.promoted", "promoted", "http://x/3")
    assert {body["name"] for _, body in live.hook.got} == {"loud", "gone", "demo", "twice"}
    assert len(live.hook.named("twice")) == 1
    assert {path for path, _ in live.hook.got} == {"/planted-hook-secret"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_announced_change_starts_an_ingestion(live):
    live.deploy()
    wait_until(lambda: len(live.automations()) >= 2)

    def ingestions():
        body = {"flows": {"name": {"any_": ["ingest"]}}}
        return get_json(f"{live.api}/flow_runs/filter", body)

    before = len(ingestions())
    live.starling("corpus", "changed", "tiny")
    (run, *_) = wait_until(lambda: ingestions()[before:] or None)
    assert run["parameters"]["config"]["name"] == "tiny"
    assert TAG in run["tags"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_container_pools_are_created_and_keep_their_type(live):
    for kind in ("docker", "kubernetes"):
        live.deploy("--pool", f"on-{kind}", "--pool-type", kind, "--image", "registry.example.com/starling:1")
        pool = get_json(f"{live.api}/work_pools/on-{kind}")
        assert pool["type"] == kind
        assert "image" in pool["base_job_template"]["variables"]["properties"]
        deployments = get_json(f"{live.api}/deployments/filter", {"work_pools": {"name": {"any_": [f"on-{kind}"]}}})
        assert {deployment["job_variables"]["image"] for deployment in deployments} == {
            "registry.example.com/starling:1"
        }
        assert all("set_working_directory" in json.dumps(deployment["pull_steps"]) for deployment in deployments)
    refused = live.deploy("--pool", "on-docker", check=False)
    assert refused.returncode == 1
    assert "has the type docker, not process" in refused.stderr
    live.deploy()


TAGGED_FLOW = """
import time
from prefect import flow, tags
@flow
def short():
    time.sleep(2)
with tags("starling"):
    short()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_run_sends_tagged_heartbeats(live):
    clean = {"PATH": "/usr/bin:/bin", **live.env, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30", "HOME": str(live.home)}
    subprocess.run([sys.executable, "-c", TAGGED_FLOW], cwd=ROOT, env=clean, check=True, timeout=240)
    body = {"filter": {"event": {"name": [HEARTBEAT]}}}
    heartbeats = wait_until(
        lambda: [
            event
            for event in get_json(f"{live.api}/events/filter", body)["events"]
            if any(label["prefect.resource.id"] == f"prefect.tag.{TAG}" for label in event["related"])
        ],
        30,
    )
    assert heartbeats[0]["resource"]["prefect.resource.id"].startswith("prefect.flow-run.")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_runs_without_heartbeats_crash_despite_server_outage(live):
    live.deploy()
    others = [{"prefect.resource.id": "prefect.tag.other", "prefect.resource.role": "tag"}]
    names = ("healthy", "dead", "waiting", "finished", "foreign")
    runs = {name: live.make_run(name, "PENDING" if name == "waiting" else "RUNNING") for name in names}
    time.sleep(5.0)  # the server has received the automation and the runs' states
    for name in ("healthy", "dead", "finished"):
        live.beat(runs[name])
    live.beat(runs["foreign"], related=others)
    time.sleep(5.0)  # events that come at once may be noted in any order
    live.set_state(runs["finished"], "COMPLETED", name="Unknown to the automation")
    for _ in range(8):
        live.beat(runs["healthy"])
        time.sleep(20.0)
        if live.state(runs["dead"])[0] == "CRASHED":
            break
    assert live.state(runs["dead"])[1] == CRASHED_MESSAGE

    orphan = live.make_run("orphan")  # dies while the server is away
    time.sleep(1.0)
    for run in (runs["healthy"], orphan):
        live.beat(run)
    live.make_run("noise")
    time.sleep(3.0)  # the server has recorded both
    live.service.process.kill()
    live.service.process.wait()
    with environment(STARLING_HOME=live.home):
        age_windows(live.home, 120.0)
    live.start()
    time.sleep(20.0)  # several evaluations
    assert live.state(runs["healthy"])[0] == "RUNNING"
    for _ in range(6):
        live.beat(runs["healthy"])
        time.sleep(20.0)
        if live.state(orphan)[0] == "CRASHED":
            break
    assert live.state(orphan)[0] == "CRASHED"
    states = {name: live.state(run)[0] for name, run in runs.items()}
    assert states == {
        "healthy": "RUNNING",
        "dead": "CRASHED",
        "waiting": "PENDING",
        "finished": "COMPLETED",
        "foreign": "RUNNING",
    }


def age_windows(home, seconds):
    """As if the server had been stopped for that long: every window ended earlier by that time."""
    import sqlite3

    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        rows = database.execute('SELECT id, start, "end" FROM automation_bucket').fetchall()
        assert rows
        for identity, start, end in rows:
            moved = [str(datetime.fromisoformat(text) - timedelta(seconds=seconds)) for text in (start, end)]
            database.execute('UPDATE automation_bucket SET start = ?, "end" = ? WHERE id = ?', (*moved, identity))
    database.close()
