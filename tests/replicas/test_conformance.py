# ruff: noqa: F401 - what is imported are the tests
"""A part of the conformance suite with two services in place of one: every request goes to another one than the last.

The tests are those of `tests.conformance`, with the fixtures of this folder. Chosen are those in which several requests
have to agree: on ids, jobs, streams, queues, lists, ends.
"""

from __future__ import annotations

from tests.conformance.test_command_control import (
    test_a_job_id_in_use_in_another_sandbox_is_a_conflict,
    test_a_job_id_with_another_command_is_a_conflict,
    test_a_lost_connection_neither_ends_nor_loses_the_command,
    test_a_repeated_request_with_a_job_id_does_not_run_again,
    test_a_signal_reaches_all_of_the_job,
    test_cancel_kills_everything_that_the_command_started,
    test_cancel_of_a_finished_command_changes_nothing,
    test_cancel_of_a_queued_command_means_that_it_never_runs,
    test_simultaneous_requests_with_one_job_id_run_once,
)
from tests.conformance.test_create import (
    test_a_repeat_with_the_same_key_and_another_body_is_a_conflict,
    test_a_repeat_with_the_same_key_and_body_is_the_same_sandbox,
    test_creation_may_wait_until_it_is_ready,
    test_simultaneous_creates_with_one_id_and_different_bodies_make_one,
    test_simultaneous_creates_with_one_key_make_one_sandbox,
    test_the_same_id_with_another_body_is_a_conflict_and_changes_nothing,
)
from tests.conformance.test_events import (
    test_a_life_is_told_as_it_happens,
    test_an_interrupted_reader_goes_on_where_it_was,
)
from tests.conformance.test_files import (
    test_a_reader_never_sees_half_a_file,
    test_a_relative_path_is_refused_or_starts_at_the_working_directory,
    test_files_of_an_unknown_sandbox_are_404,
    test_names_that_are_no_text_are_listed_all_the_same,
    test_writing_replaces_what_was_there,
)
from tests.conformance.test_jobs import (
    test_a_finished_job_stays_readable_after_its_sandbox_is_deleted,
    test_a_job_that_runs_when_its_sandbox_is_deleted_ends_with_a_reason,
    test_a_wait_that_ends_first_is_408_and_leaves_the_job,
    test_exec_with_wait_answers_with_the_whole_job,
    test_exec_without_wait_answers_at_once_with_the_job_id,
    test_many_may_wait_for_one_job,
    test_the_jobs_of_a_sandbox_are_listed,
)
from tests.conformance.test_lifecycle import (
    test_a_deleted_sandbox_says_so_on_every_later_call,
    test_a_wait_for_a_sandbox_ends_when_it_is_deleted,
    test_deleting_an_id_never_seen_is_404,
    test_deleting_twice_is_fine,
    test_patch_replaces_the_labels,
    test_the_id_of_a_deleted_sandbox_stays_taken,
)
from tests.conformance.test_listing import (
    family,
    test_a_batch_is_answered_in_order,
    test_a_page_begins_after_its_cursor_although_others_were_deleted,
    test_bulk_delete_takes_those_with_the_label_and_no_others,
    test_bulk_delete_without_a_label_is_refused,
    test_pages_show_everything_once,
)
from tests.conformance.test_pty import (
    pty,
    test_a_second_connection_is_refused_unless_it_takes_over,
    test_a_terminal_outlives_its_connection_and_shows_what_was_missed,
    test_a_wrong_key_closes_with_4401,
    test_an_unknown_sandbox_closes_with_4404,
    test_its_id_is_that_of_a_job,
    test_nothing_is_lost_before_the_exit,
)
from tests.conformance.test_sessions import test_sessions_are_listed_and_forgotten
from tests.conformance.test_streams import (
    test_a_reader_that_goes_away_is_let_go,
    test_both_streams_come_whole_and_then_the_job,
    test_raw_gives_the_plain_bytes_of_one_stream,
    test_the_end_of_the_sandbox_ends_the_stream,
    test_the_id_of_an_event_says_where_to_go_on,
)
