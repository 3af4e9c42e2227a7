"""Queries of Spark at a broker that asks who they are."""

from pathlib import Path

import pytest
from kafka_words import committed_of
from scenes import Scene
from streams import Job, numbered, texts, values_of

from security import token_function
from security.guarded import Guarded, query

pytestmark = pytest.mark.spark


def test_a_query_with_TLS_and_SCRAM_reads_all_and_goes_on(guarded: Guarded, scene: Scene) -> None:
    topic = guarded.topic("spark-scram")
    guarded.produce(topic, numbered(0, 9, 2))
    job = Job(scene.spark, query(guarded.scram(), scene.group, topic), scene.folder / "c")
    assert values_of(job.run()) == texts(0, 9)
    guarded.produce(topic, numbered(10, 14, 2))
    assert values_of(job.run()) == texts(10, 14)
    assert sum(committed_of(guarded.admin, scene.group).values()) == 15


def test_a_query_with_a_users_function_finds_it_in_every_process(guarded: Guarded, scene: Scene) -> None:
    topic = guarded.topic("spark-function")
    guarded.produce(topic, numbered(0, 9, 2))
    source = Path(token_function.__file__).read_text()
    module = scene.folder / "users_tokens.py"
    module.write_text(source)
    given = query(guarded.function("users_tokens:token"), scene.group, topic)
    job = Job(scene.spark, given, scene.folder / "c")
    with pytest.raises(Exception, match=r"cannot be imported by .*--py-files"):
        job.load()
    scene.spark.sparkContext.addPyFile(str(module))
    assert values_of(job.run()) == texts(0, 9)
