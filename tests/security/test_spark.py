"""A query of Spark at a broker that asks who it is; each way to say so is tried without Spark."""

from pathlib import Path

import pytest
from kafka_words import committed_of
from scenes import Scene
from streams import Job, numbered, texts, values_of

from security import token_function
from security.guarded import Guarded, query

pytestmark = pytest.mark.spark


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
    guarded.produce(topic, numbered(10, 14, 2))
    assert values_of(job.run()) == texts(10, 14)
    assert sum(committed_of(guarded.admin, scene.group).values()) == 15
