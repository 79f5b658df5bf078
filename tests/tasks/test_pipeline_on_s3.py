"""A whole pipeline whose object store is a real S3 server."""

import json

import pytest
from support import copy_finished, tiny_document

from storage.objects import ObjectStore
from tasks.config import parse_config
from tasks.home import home as data_folder
from tasks.orchestration import run_plainly
from tasks.stage import Run, StageError


def test_the_whole_pipeline_runs_on_s3_and_leaves_no_secret(home, s3_server):
    copy_finished(home)  # for its synthesized corpus
    config = parse_config(tiny_document(storage={"url": "s3://speech/pipeline", "shard_seconds": 20}))
    run = Run(config, "on-s3")
    run_plainly(run)
    names = ObjectStore("s3://speech/pipeline").list("")
    assert {name.split("/")[0] for name in names} == {*run.results}
    assert run.results["score"].record["sets"]["test"]["words"] > 0
    again = Run(config, "on-s3-again")
    run_plainly(again)
    assert all(result.cached for result in again.results.values())
    secret = s3_server.environment()["AWS_SECRET_ACCESS_KEY"]
    texts = [path.read_bytes() for path in data_folder().rglob("*") if path.is_file()]
    assert not any(secret.encode() in text for text in texts)
    assert secret not in json.dumps([result.to_dict() for result in run.results.values()])


def test_training_on_memory_is_refused_with_the_remedy(home):
    copy_finished(home)
    config = parse_config(tiny_document(storage={"url": "memory://tiny", "shard_seconds": 20}))
    with pytest.raises(StageError, match="use a folder or s3"):
        run_plainly(Run(config, "in-memory"))
