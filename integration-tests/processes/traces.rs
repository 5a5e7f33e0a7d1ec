//! A run's steps as OpenTelemetry traces, taken by its own package for Python.

use crate::{serve::python, support::cox};

#[test]
fn a_step_is_one_trace_with_all_ranks_and_a_collector_that_is_gone_costs_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = cox(&[]).get_program().display().to_string();
    python("grpc, opentelemetry.proto", "check_traces.py", &[&program, &dir.path().display().to_string()]);
}
