"""The tiers of the suite, and the rule that divides them: a test of the first tier stays in the process of pytest.

    pytest             first tier: whatever stays in one process, and the few of FIRST
    pytest -m tier2    second tier: tests that start a process, an interpreter or a compiler
    pytest -m ""       both, and every case of interpreted kernels

FILES, FIXTURES and TESTS name the second tier. A test that is in none of them and starts a process fails, except where
there is a GPU, for which kernels are compiled. Of a test of interpreted kernels, the first case is in the first tier,
the others are in the second; those of INTERPRETED_LONG are in neither, because they take minutes: `pytest -m "gpu or
interpreter"` runs them, best on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FILES = {
    "adapters/test_transferqueue_faults.py": "a queue",
    "adapters/test_transferqueue_manager.py": "a queue",
    "adapters/test_transferqueue_rows.py": "a queue",
    "adapters/test_transferqueue_upstream.py": "its own tests",
    "adapters/test_trl.py": "ranks",
    "adapters/test_verl_engine.py": "ranks",
    "bench/test_all_arms.py": "Ray",
    "bench/test_cases.py": "Ray, and a benchmark for each case",
    "core/test_aarch64.py": "a compiler, and an emulator",
    "core/test_sanitized.py": "a compiler",
    "core/test_targets.py": "a compiler",
    "dispatch/test_cluster.py": "a cluster of two nodes",
    "dispatch/test_faults.py": "ranks that die",
    "dispatch/test_fuzz_dispatch.py": "ranks",
    "docs/test_site.py": "Sphinx",
    "examples/test_adopt.py": "Ray",
    "examples/test_analyse_rollouts.py": "the program",
    "examples/test_async_trainer.py": "Ray, and a trainer that is killed",
    "examples/test_resume_grpo.py": "trainers that are killed",
    "examples/test_verl_v1_cpu.py": "Ray",
    "ops/test_split_logits.py": "ranks",
    "ops/test_vocab_parallel.py": "ranks",
    "planning/test_agreement.py": "ranks",
    "replay/test_context_parallel.py": "ranks",
    "replay/test_replay_sharded.py": "ranks",
    "test_processes.py": "forks",
    "test_triton_targets.py": "a compiler",
}
"""Files of which every test is in the second tier, with what they start."""
FIXTURES = {"local_ray": "Ray"}
"""Fixtures that start processes: every test that has one is in the second tier."""
TESTS = {
    "adapters/test_collator.py::test_every_token_is_where_a_loop_puts_it",
    "core/test_native.py::test_a_core_of_another_version_says_what_to_do",
    "core/test_native.py::test_a_missing_core_says_what_to_do",
    "core/test_native.py::test_a_struct_of_another_size_says_what_to_do",
    "docs/test_docs.py::test_blocks_run",
    "examples/test_demo.py::test_demo_fails_on_one_changed_value",
    "examples/test_demo.py::test_demo_runs_from_any_directory",
    "layout/test_jagged.py::test_maskpack_needs_no_private_name_to_be_imported",
    "layout/test_kernels.py::test_one_graph_for_a_compiler",
    "nesting/test_check.py::test_records_go_nowhere_unless_the_program_says_so",
    "nesting/test_sub_batches.py::test_a_file_names_a_class_that_the_reader_has_imported",
    "ops/test_log_probs.py::test_kernels_of_ranks_with_a_slice_each",
    "packed/test_device_work.py::test_coded_blocks_are_those_of_the_host",
    "packed/test_wire.py::test_a_dictionary_is_split_row_by_row",
    "packed/test_wire.py::test_a_mapped_file_that_is_written_to_leads_nowhere_else",
    "packed/test_wire.py::test_a_short_run_of_the_fuzzer",
    "packed/test_wire.py::test_dictionaries_store_no_more_rows_than_they_have_rows_and_numbers",
    "packed/test_wire.py::test_no_entry_refers_to_a_concat",
    "packed/test_wire.py::test_numbers_of_a_table_of_all_encodings_set_to_others",
    "packed/test_wire.py::test_numbers_of_a_table_set_to_others",
    "packed/test_wire.py::test_rows_of_one_length_are_checked_at_once",
    "packed/test_wire.py::test_rows_that_are_not_taken_are_not_decoded",
    "packed/test_wire.py::test_stored_rows_of_a_dictionary_that_no_row_uses_are_not_decoded",
    "packed/test_wire.py::test_stretches_of_stored_words_as_another_writer_may_store_them",
    "packed/test_wire.py::test_what_a_message_says_is_not_looked_at_one_by_one",
    "replay/test_invariant.py::test_ranks_of_a_sharded_model_probe_together",
    "replay/test_replay_heads.py::test_sharded_output_layers",
    "replay/test_replay_images.py::test_sharded_replay_is_that_of_each_row_alone",
    "replay/test_replay_images.py::test_what_ranks_refuse_together",
    "replay/test_replay_mixers.py::test_sharded_layers",
    "replay/test_replay_models.py::test_layers_that_never_attend_through_the_interface_are_found",
    "store/test_log_faults.py::test_a_fork_can_read_and_cannot_write",
    "store/test_log_faults.py::test_a_fork_does_not_keep_the_lock",
    "store/test_log_faults.py::test_a_log_that_nobody_closes_is_synced",
    "store/test_log_faults.py::test_files_that_cannot_be_opened_or_mapped",
    "store/test_log_faults.py::test_random_faults",
    "store/test_log_faults.py::test_readers_beside_a_writer_that_is_killed",
    "test_imports.py::test_a_heavy_import_would_be_seen",
    "test_imports.py::test_importing_maskpack_is_light",
    "test_tiers.py::test_a_test_of_the_first_tier_that_starts_a_process_fails",
    "test_tiers.py::test_one_of_the_second_tier_may_start_one",
    "testing/test_pytest_plugin.py::test_a_run_without_the_option_imports_neither_maskpack_nor_torch",
    "testing/test_pytest_plugin.py::test_the_header_says_it_and_the_variable_is_put_back",
    "testing/test_pytest_plugin.py::test_with_the_option_every_call_is_strict",
    "testing/test_pytest_plugin.py::test_without_it_nothing_is",
    "tools/test_doctor.py::test_it_takes_twice_the_memory_of_the_batch",
}
"""Functions of the second tier, in files that have others."""
FIRST = {
    "dispatch/test_dispatch.py::test_rows_there_and_back[echo]",
    "store/test_log_faults.py::test_random_faults[kill-1]",
}
"""Tests that start processes, and are in the first tier all the same."""
INTERPRETED_LONG = {"packed/test_same_rows.py", "packed/test_device_work.py", "layout/test_kernels.py"}
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
_started: list[str] = []
"""What was started since the running test began; empty between tests."""


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks the items of the second tier with `tier2`, and those of neither with `every_case`."""
    interpreted = set[str]()
    for item in items:
        file = item.path.relative_to(HERE).as_posix()
        function, name = f"{file}::{item.name.partition('[')[0]}", f"{file}::{item.name}"
        if item.get_closest_marker("interpreter"):
            if function in interpreted:
                item.add_marker("every_case" if file in INTERPRETED_LONG else "tier2")
                continue
            interpreted.add(function)
        fixtures = FIXTURES.keys() & {*getattr(item, "fixturenames", ())}
        if name not in FIRST and (file in FILES or function in TESTS or fixtures):
            item.add_marker("tier2")


def watch() -> None:
    """From now on `_started` is kept. There is no way to stop an audit hook."""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS:
            _started.append(f"{event} {arguments[0] if arguments else ''}"[:200])

    start = BaseProcess.start

    def heard(process: BaseProcess) -> None:  # spawned and forked by a server, which no event tells
        _started.append(f"multiprocessing {process.name}")
        start(process)

    sys.addaudithook(hear)
    BaseProcess.start = heard


def forget() -> None:
    """What was started until now, by imports, say, is nobody's."""
    _started.clear()


@contextmanager
def stays_in_its_process(item: pytest.Item) -> Iterator[None]:
    """Raises AssertionError at the end if an item of the first tier has started a process."""
    try:
        yield
    finally:
        seen = list(_started)
        forget()
    file = item.path.relative_to(HERE).as_posix()
    if seen and not item.get_closest_marker("tier2") and f"{file}::{item.name}" not in FIRST:
        raise AssertionError(
            f"{item.nodeid} is in the first tier and starts a process: {seen[0]}. Name it in tests/tiers.py."
        )
