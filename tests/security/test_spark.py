"""A Spark query with a token function; all other kinds of authentication are tested without Spark."""

from pathlib import Path

import pytest
from kafka_helpers import committed_of
from scenes import Scene
from streams import Job, numbered, texts, values_of

from security import token_function
from security.secured import SecuredBroker, query

pytestmark = pytest.mark.spark


def test_a_token_function_is_imported_in_every_process(secured: SecuredBroker, scene: Scene) -> None:
    topic = secured.topic("spark-function")
    secured.produce(topic, numbered(0, 9, 2))
    source = Path(token_function.__file__).read_text()
    module = scene.folder / "users_tokens.py"
    module.write_text(source)
    given = query(secured.function("users_tokens:token"), scene.group, topic)
    job = Job(scene.spark, given, scene.folder / "c")
    with pytest.raises(Exception, match=r"cannot import it .*--py-files"):
        job.load()
    scene.spark.sparkContext.addPyFile(str(module))
    assert values_of(job.run()) == texts(0, 9)
    secured.produce(topic, numbered(10, 14, 2))
    assert values_of(job.run()) == texts(10, 14)
    assert sum(committed_of(secured.admin, scene.group).values()) == 15
