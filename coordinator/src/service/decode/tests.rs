use prost::Message;

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
        format!("steps[0].metrics: has {} entries; at most {MAX_METRICS} are allowed", MAX_METRICS + 1)
    );
    let long = "x".repeat(65);
    assert_eq!(
        refused(vec![metric("x", "1"), metric(&long, "1")]),
        "steps[0].metrics[1].name: has 65 bytes; at most 64 are allowed"
    );
    assert!(refused(vec![metric("a b", "1")]).starts_with("steps[0].metrics[0].name: \"a b\" is not"));
    assert_eq!(
        refused(vec![metric("x", "m/s")]),
        "steps[0].metrics[0].unit: \"m/s\" is no unit (letters, digits, _)"
    );
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
        "failure.victims: has 100001 entries; at most 100000 are allowed"
    );
    let samples = |count: usize| v1::Failure {
        samples: vec![v1::SampleRange { begin: 1, end: 2 }; count],
        ..failure.clone()
    };
    assert!(failed(samples(MAX_SAMPLE_RANGES)).is_ok());
    assert_eq!(
        failed(samples(MAX_SAMPLE_RANGES + 1)).unwrap_err().to_string(),
        "failure.samples: has 4097 entries; at most 4096 are allowed"
    );
}

#[test]
fn reports_have_no_more_steps_and_phases_than_there_can_be() {
    let steps = vec![v1::StepReport::default(); REPORT_QUEUE + 1];
    let error = Ask::try_from(v1::ReportStepsRequest { worker_id: 1, steps }).unwrap_err();
    assert_eq!(error.to_string(), "steps: has 4097 entries; at most 4096 are allowed");
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
    assert_eq!(error.to_string(), "failure.kind: is set by the coordinator alone");
}

/// What a worker asks, with something in most fields.
fn asked() -> [Vec<u8>; 6] {
    let samples = vec![v1::SampleRange { begin: 3, end: 7 }, v1::SampleRange { begin: 9, end: 12 }];
    let metric = v1::Metric { name: "loss/mse".into(), unit: "1".into(), value: 0.5, ..Default::default() };
    let step =
        v1::StepReport { step: 4, samples: samples.clone(), metrics: vec![metric; 2], ..Default::default() };
    let failure = v1::Failure {
        kind: v1::FailureKind::BadInput.into(),
        phase: v1::WorkerPhase::Forward.into(),
        message: "a row".into(),
        victims: vec![1, 2],
        samples,
        ..Default::default()
    };
    [
        v1::ReportStepsRequest { worker_id: 1, steps: vec![step; 2] }.encode_to_vec(),
        v1::ReportFailureRequest { failure: Some(failure), ..Default::default() }.encode_to_vec(),
        v1::JoinNodeRequest { host: "node".into(), local_world_size: 2, ..Default::default() }
            .encode_to_vec(),
        v1::RegisterRequest { rank: 1, pid: 7, device: "cpu".into(), ..Default::default() }.encode_to_vec(),
        v1::ReportMemoryRequest { worker_id: 1, phases: vec![Default::default(); 2], ..Default::default() }
            .encode_to_vec(),
        v1::ReportCacheRequest { worker_id: 2, report: Some(v1::CacheReport::default()) }.encode_to_vec(),
    ]
}

#[test]
fn hostile_messages_are_refused_or_decoded_within_their_own_size() {
    fn ask<T: Message + Default>(bytes: &[u8])
    where
        Ask: TryFrom<T>,
    {
        if let Ok(wire) = T::decode(bytes) {
            drop(Ask::try_from(wire));
        }
    }
    let all = [
        ask::<v1::JoinNodeRequest>,
        ask::<v1::RegisterRequest>,
        ask::<v1::ReadyRequest>,
        ask::<v1::ReportStartRequest>,
        ask::<v1::HeartbeatRequest>,
        ask::<v1::ReportStepsRequest>,
        ask::<v1::ReportMemoryRequest>,
        ask::<v1::ReportCheckpointRequest>,
        ask::<v1::ReportFailureRequest>,
        ask::<v1::ReportExitRequest>,
        ask::<v1::ReportCacheRequest>,
    ];
    // An empty message within another takes two bytes on the wire.
    coxswain_fuzz::Target::new("requests", asked()).tries(10_000).holds(64 << 10, 1024).check(|bytes| {
        all.iter().for_each(|ask| ask(bytes));
    });
}
