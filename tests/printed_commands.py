"""The commands of a message, as an operator copies them, and a list of all messages that have commands.

Runs in: tests. Deliberately absent: running a command, which needs the test's brokers and tables.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import typer.main

import spark_group_source
from spark_group_source.cli.app import app

PROGRAMS = ("spark-group", "kafka-configs.sh", "pip", "keytool", "openssl")
_LINE = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
_SENTENCE = re.compile(rf"`((?:{'|'.join(map(re.escape, PROGRAMS))}) [^`]+)`")


def commands(message: object) -> list[str]:
    """Return the commands of a message: lines that are indented by four spaces, then those in a sentence."""
    text = str(message)
    return _LINE.findall(text) + _SENTENCE.findall(text)


# --- all commands of the product ------------------------------------------------------------------------

PRODUCT = Path(spark_group_source.__file__).parent

SUBCOMMANDS = sorted(typer.main.get_group(app).commands)
TEXT = re.compile(
    rf"spark-group (?:{'|'.join(SUBCOMMANDS)})\b|\bkafka-[a-z-]+\.sh\b|\bpip install\b|\bspark-submit --"
    r"|\b(?:keytool|openssl) |\b(?:RESTORE|ALTER|CREATE|DROP|TRUNCATE) TABLE\b|\bDESCRIBE HISTORY\b"
)
"""The beginning of a command in a text."""
BUILDERS = {
    ("command_line", "spark_group"),
    ("table_names", "reset_command"),
    ("table_names", "restore_command"),
    ("table_names", "ledger_command"),
    ("shlex", "join"),
}
"""Functions that return a command."""


def commands_of(tree: ast.AST, place: str = "") -> Iterator[str]:
    """The function of each command below a node: of a text that contains one, or of a call that builds one."""
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return  # a docstring
    if isinstance(tree, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        place = f"{place}.{tree.name}" if place else tree.name
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield from [place] * len(TEXT.findall(tree.value))
    if isinstance(tree, ast.JoinedStr):
        texts = [part.value if isinstance(part, ast.Constant) else "{}" for part in tree.values]
        yield from [place] * len(TEXT.findall("".join(map(str, texts))))
        for part in tree.values:
            if isinstance(part, ast.FormattedValue):
                yield from commands_of(part.value, place)
        return
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute) and isinstance(tree.func.value, ast.Name):
        yield from [place] * ((tree.func.value.id, tree.func.attr) in BUILDERS)
    for child in ast.iter_child_nodes(tree):
        yield from commands_of(child, place)


def commands_of_the_product() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in sorted(PRODUCT.rglob("*.py")):
        module = path.relative_to(PRODUCT).as_posix()
        found.update(f"{module}: {place}" for place in commands_of(ast.parse(path.read_text())))
    return found


SINK = "tests/delta/decisions/test_commands.py::"
REPLACED = "tests/delta/decisions/test_replaced_rows.py::"
STATEMENTS = "tests/delta/test_foreign_changes.py::test_the_statements_of_messages_run_on_spark"
HERE = "tests/test_commands.py::"
BROKER, INSTALL = f"{HERE}test_a_command_runs_as_printed", f"{HERE}test_an_installation_is_satisfied_as_printed"
DOCUMENTS = "tests/cli/test_typed.py::test_commands_of_the_documents_run_as_printed"
"""``docs/errors.md`` is rendered from the remedies."""
LOCAL = "tests/local/test_broker.py"
ON_A_CLUSTER = "test_a_cluster_runs_the_job_with_archives_and_without_them_the_error_names_the_missing_package"
NO_COMMAND = ""

TESTED: dict[str, tuple[int, str]] = {
    # commands that these functions build for others
    "command_line.py: spark_group": (1, BROKER),
    "delta/table_names.py: reset_command": (1, f"{REPLACED}test_commands_after_a_restore"),
    "delta/table_names.py: restore_command": (1, f"{SINK}test_commands_for_a_second_write_of_a_batch"),
    # the sink and its ledger
    "delta/ledger_decision.py: _refused_partitions": (
        2,
        f"{SINK}test_commands_after_a_foreign_commit_below_the_ledger",
    ),
    "delta/ledger_decision.py: _unknown_reset": (1, f"{SINK}test_command_for_a_stream_that_does_not_know_a_reset"),
    "delta/ledger_format.py: _damaged": (1, f"{SINK}test_command_for_a_ledger_that_cannot_be_read"),
    "delta/ledger_store.py: _new_ledger": (1, f"{SINK}test_command_for_a_ledger_that_cannot_be_read"),
    "delta/replaced_rows.py: _batch_behind_restore": (2, f"{REPLACED}test_commands_for_a_batch_behind_a_restore"),
    "delta/replaced_rows.py: _rows_replaced": (3, f"{REPLACED}test_commands_after_rows_were_replaced"),
    "delta/replaced_rows.py: _other_rows_restored": (1, f"{REPLACED}test_commands_after_a_restore"),
    "delta/ledger_store.py: check_new_group": (2, f"{SINK}test_commands_for_a_clone_of_a_table_with_a_ledger"),
    "delta/ledger_store.py: _renamed": (3, f"{SINK}test_commands_for_a_renamed_group_in_a_clone"),
    "delta/table_names.py: ledger_command": (1, f"{SINK}test_commands_for_a_renamed_group"),
    "cli/ledger.py: _show_transfer": (1, f"{SINK}test_commands_for_a_renamed_group"),
    "delta/sink.py: DeltaSink._check_properties": (1, STATEMENTS),
    "delta/merge.py: MergeWriter._add_columns": (1, NO_COMMAND),
    "delta/merge.py: MergeWriter._without_late": (1, NO_COMMAND),
    "delta/table_writer.py: OptionsWriter.create": (1, NO_COMMAND),
    "delta/sink.py: BatchCommit._ways_to_continue": (
        2,
        f"{SINK}test_commands_for_an_expired_ledger_whose_rows_end_behind_the_batch",
    ),
    "delta/sink.py: BatchCommit._log_decision": (1, f"{SINK}test_command_that_writes_left_out_rows_again"),
    "delta/write_guard.py: _batch_missing": (
        1,
        f"{SINK}test_command_for_a_batch_whose_error_the_users_function_caught",
    ),
    "delta/write_guard.py: _second_write": (2, f"{SINK}test_commands_for_a_second_write_of_a_batch"),
    # groups and brokers
    "cli/migrate.py: _offsets": (1, BROKER),
    "cli/migrate.py: _starting_offsets": (1, BROKER),
    "cli/offsets.py: delete": (1, BROKER),
    "cli/report.py: missing_group": (1, BROKER),
    "cli/group_reset.py: refuse_former_topics.command": (
        1,
        f"{SINK}test_a_reset_that_keeps_an_offset_of_a_former_topic_is_refused_and_its_command_loses_nothing",
    ),
    "host/run_files.py: drain": (2, BROKER),
    "kafka/consumer.py: MemberConsumer._brokers_settings": (2, f"{HERE}test_kafkas_tool_shows_the_settings_of_brokers"),
    "kafka/group_admin.py: GroupAdmin._move": (1, BROKER),
    "local/background.py: start": (1, f"{LOCAL}::test_background_broker_is_started_shown_and_stopped"),
    "protocol/offsets.py: parse": (1, f"{HERE}test_the_checkpoint_of_another_source_names_a_command_with_help"),
    "protocol/data_loss.py: DataLossDetector._log_is_short": (1, BROKER),
    "protocol/group_assignment.py: GroupAssignment.timeout": (1, BROKER),
    "reader/broker_checks.py: unreadable_record": (1, BROKER),
    # installations and conversions
    "cli/run.py: _check_delta": (1, f"{HERE}test_the_options_of_spark_submit_are_those_of_a_session_with_delta_lake"),
    "compatibility.py: problem": (3, INSTALL),
    "decode.py: _new_client": (1, INSTALL),
    "librdkafka.py: Library.__init__": (1, INSTALL),
    "librdkafka.py: _loaded": (1, INSTALL),
    "librdkafka.py: extension": (1, INSTALL),
    "librdkafka.py: token_source": (1, INSTALL),
    "local/jars.py: _spark_jars": (1, INSTALL),
    "reader/records.py: _check_pyarrow": (1, INSTALL),
    "source.py: _start_metrics": (1, INSTALL),
    "options/java.py: _to_pem": (1, f"{HERE}test_stores_are_converted_as_printed"),
    "options/java.py: _to_pkcs12": (1, f"{HERE}test_stores_are_converted_as_printed"),
    "options/client.py: import_callable": (
        1,
        "tests/security/test_spark.py::test_a_token_function_is_imported_in_every_process",
    ),
    "compatibility.py: _unpickle": (1, f"tests/crash/test_install.py::{ON_A_CLUSTER}"),
    # remedies, rendered in docs/errors.md
    "errors.py: CommitFailed": (1, DOCUMENTS),
    "errors.py: LedgerConflict": (2, DOCUMENTS),
    "errors.py: RebalanceTimeout": (1, DOCUMENTS),
    "cli/group_reset.py: _completion": (
        1,
        f"{SINK}test_command_that_completes_a_relative_reset_does_not_move_the_group_twice",
    ),
    "cli/group_reset.py: recorded_offsets": (
        1,
        f"{SINK}test_a_reset_to_offsets_of_a_topic_that_was_recreated_is_refused_and_its_command_loses_nothing",
    ),
    # texts that are no commands: a ledger's reason, statements of the product, names of operations in Delta's log
    "cli/group_reset.py: reset": (1, NO_COMMAND),
    "delta/table_history.py: DescribedHistory._load": (1, NO_COMMAND),
    "delta/verification.py: ": (3, NO_COMMAND),
}
"""By module and function: the number of its commands, and the test that runs them as printed."""
