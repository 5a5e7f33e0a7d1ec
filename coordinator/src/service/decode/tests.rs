use super::*;

#[test]
fn an_error_names_the_field_inside_the_message() {
    let mut wire = v1::ReportStepsRequest { worker_id: 1, steps: vec![v1::StepReport::default(); 2] };
    wire.steps[1].samples = vec![v1::SampleRange { begin: 4, end: 3 }];
    let error = Ask::try_from(wire).unwrap_err();
    assert_eq!(error.to_string(), "steps[1].samples[0]: begins at 4, after its end 3");
}

#[test]
fn metrics_that_are_too_many_or_badly_named_are_refused_with_their_place() {
    let step = |metrics: Vec<v1::Metric>| {
        let steps = vec![v1::StepReport { metrics, ..Default::default() }];
        Ask::try_from(v1::ReportStepsRequest { worker_id: 1, steps })
    };
    let metric =
        |name: &str, unit: &str| v1::Metric { name: name.into(), unit: unit.into(), ..v1::Metric::default() };
    assert!(step(vec![metric("made_up/thing", "s"); MAX_METRICS]).is_ok());
    let refused = |metrics| step(metrics).unwrap_err().to_string();
    assert_eq!(
        refused(vec![metric("x", "1"); MAX_METRICS + 1]),
        format!("steps[0].metrics: {} of them; {MAX_METRICS} are allowed", MAX_METRICS + 1)
    );
    let long = "x".repeat(65);
    assert_eq!(
        refused(vec![metric("x", "1"), metric(&long, "1")]),
        "steps[0].metrics[1].name: has 65 bytes; 64 are allowed"
    );
    assert!(refused(vec![metric("a b", "1")]).starts_with("steps[0].metrics[0].name: \"a b\" is not"));
    assert_eq!(refused(vec![metric("x", "m/s")]), "steps[0].metrics[0].unit: \"m/s\" is not a unit");
}

#[test]
fn lists_of_a_failure_have_their_bounds() {
    let failed = |failure: v1::Failure| {
        let wire = v1::ReportFailureRequest { failure: Some(failure), ..Default::default() };
        Ask::try_from(wire)
    };
    let failure = v1::Failure {
        kind: v1::FailureKind::Io.into(),
        phase: v1::WorkerPhase::Forward.into(),
        ..v1::Failure::default()
    };
    let victims = |count: usize| v1::Failure { victims: vec![0; count], ..failure.clone() };
    assert!(failed(victims(MAX_WORLD)).is_ok());
    assert_eq!(
        failed(victims(MAX_WORLD + 1)).unwrap_err().to_string(),
        "failure.victims: 10001 of them; 10000 are allowed"
    );
    let samples = |count: usize| v1::Failure {
        samples: vec![v1::SampleRange { begin: 1, end: 2 }; count],
        ..failure.clone()
    };
    assert!(failed(samples(MAX_SAMPLE_RANGES)).is_ok());
    assert_eq!(
        failed(samples(MAX_SAMPLE_RANGES + 1)).unwrap_err().to_string(),
        "failure.samples: 4097 of them; 4096 are allowed"
    );
}

#[test]
fn reports_have_no_more_steps_and_phases_than_there_can_be() {
    let steps = vec![v1::StepReport::default(); REPORT_QUEUE + 1];
    let error = Ask::try_from(v1::ReportStepsRequest { worker_id: 1, steps }).unwrap_err();
    assert_eq!(error.to_string(), "steps: 4097 of them; 4096 are allowed");
    let phases = vec![v1::PhaseMemory::default(); PHASES + 1];
    let wire = v1::ReportMemoryRequest { worker_id: 1, phases, ..Default::default() };
    assert!(Ask::try_from(wire).unwrap_err().to_string().starts_with("phases: "));
}

#[test]
fn what_no_worker_may_say_is_refused() {
    let failure = v1::Failure {
        kind: v1::FailureKind::WorkerLost.into(),
        phase: v1::WorkerPhase::Forward.into(),
        ..v1::Failure::default()
    };
    let wire = v1::ReportFailureRequest { failure: Some(failure), ..Default::default() };
    let error = Ask::try_from(wire).unwrap_err();
    assert_eq!(error.to_string(), "failure.kind: is the coordinator's to say");
}
