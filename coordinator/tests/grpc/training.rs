//! Whole runs, from the first worker to the outcome.

use coxswain_coordinator::{CauseKind, Outcome};
use coxswain_proto::{
    ids::{Slot, Step},
    v1::{self, directive::Kind},
};
use tonic::Code;

use crate::harness::{FakeWorker, Sandbox, fragile, impatient, options, register, spec};

async fn train(world: u32) {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 40), world)).await;
    let mut fake_workers = sandbox.fake_workers(world).await;
    for worker in &mut fake_workers {
        assert_eq!(worker.begin().await, 0);
        let Kind::Lease(lease) = worker.told().await else { panic!("not a lease") };
        assert_eq!((lease.first_step, lease.end_step), (0, 32));
        assert_eq!((lease.slice, lease.slices), (worker.rank, world));
    }
    for step in 0..40 {
        for worker in &mut fake_workers {
            let committed = worker.steps(step..step + 1).await.unwrap();
            let all = worker.rank + 1 == world;
            assert_eq!(committed, if all { step + 1 } else { step });
        }
    }
    for worker in &mut fake_workers {
        let Kind::Lease(lease) = worker.told().await else { panic!("not a lease") };
        assert_eq!((lease.first_step, lease.end_step), (32, 40));
        worker.leave(0).await;
    }
    assert_eq!(sandbox.outcome().await.unwrap(), Outcome::Finished { steps: Step(40) });
}

#[tokio::test]
async fn a_world_of_one_trains_to_the_end() {
    train(1).await;
}

#[tokio::test]
async fn a_world_of_two_trains_to_the_end() {
    train(2).await;
}

#[tokio::test]
async fn a_world_of_four_trains_to_the_end() {
    train(4).await;
}

#[tokio::test]
async fn a_worker_reads_the_run_before_it_registers() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), 10);
    let sandbox = Sandbox::start(options(spec.clone(), 2)).await;
    let mut client = sandbox.workers().await;
    let request = v1::GetRunRequest { version: coxswain_proto::VERSION.into(), run_id: String::new() };
    let run = client.get_run(request).await.unwrap().into_inner();
    let document = run.spec.unwrap();
    assert_eq!(coxswain_proto::run_spec::RunSpec::try_from(&document).unwrap(), spec);
    assert_eq!(run.world_size, 2);
    assert!(run.run_id.starts_with("quick-"), "{}", run.run_id);
}

#[tokio::test]
async fn strangers_are_refused_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 2)).await;
    let _first = sandbox.worker(0).await;
    let mut refused = Vec::new();
    let changes: [fn(&mut v1::RegisterRequest); 6] = [
        |request| request.rank = 0,
        |request| request.version = "9.9.9".into(),
        |request| request.run_id = "another".into(),
        |request| request.dataset_fingerprint = "beef".into(),
        |request| request.rank = 2,
        |request| request.data_address = String::new(),
    ];
    for change in changes {
        let mut request = register(1);
        change(&mut request);
        let joined = FakeWorker::join(sandbox.workers().await, sandbox.plan, request).await;
        let status = joined.err().unwrap();
        refused.push((status.code(), status.message().to_owned()));
    }
    let codes: Vec<_> = refused.iter().map(|(code, _)| *code).collect();
    use Code::{AlreadyExists, FailedPrecondition, InvalidArgument};
    assert_eq!(
        codes,
        [
            AlreadyExists,
            FailedPrecondition,
            FailedPrecondition,
            FailedPrecondition,
            InvalidArgument,
            InvalidArgument
        ]
    );
    assert!(refused[0].1.contains("taken by process 100 on node-a"), "{}", refused[0].1);
    assert!(refused[1].1.contains("install the same version"), "{}", refused[1].1);
    assert_eq!(refused[5].1, "data_address: is empty");
    // The place is still free for the right one.
    sandbox.worker(1).await.assigned().await;
}

#[tokio::test]
async fn a_worker_that_vanishes_ends_a_run_without_a_budget() {
    let directory = tempfile::tempdir().unwrap();
    let mut options = fragile(options(spec(directory.path(), 10), 2));
    options.patience = impatient();
    let sandbox = Sandbox::start(options).await;
    let mut fake_workers = sandbox.fake_workers(2).await;
    for worker in &mut fake_workers {
        worker.begin().await;
    }
    drop(fake_workers.pop());
    loop {
        if let Kind::Abort(abort) = fake_workers[0].told().await {
            assert!(abort.reason.contains("rank 1"), "{}", abort.reason);
            break;
        }
    }
    fake_workers[0].leave(4).await;
    let Outcome::Failed(cause) = sandbox.outcome().await.unwrap() else { panic!("not failed") };
    assert_eq!((cause.slot, cause.kind), (Some(Slot(1)), CauseKind::WorkerLost));
}

#[tokio::test]
async fn the_reported_cause_is_the_outcome() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 2)).await;
    let mut fake_workers = sandbox.fake_workers(2).await;
    let failure = v1::Failure {
        phase: v1::WorkerPhase::Forward.into(),
        step: 3,
        kind: v1::FailureKind::OutOfMemory.into(),
        message: "9 GiB do not fit".into(),
        ..Default::default()
    };
    let mut request = v1::ReportFailureRequest {
        worker_id: Some(fake_workers[1].id),
        failure: Some(failure),
        ..Default::default()
    };
    let status = fake_workers[1].client.report_failure(request.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "a failure of another run is not ours");
    let mut people = sandbox.people().await;
    let status = people.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    request.run_id = status.run_id;
    fake_workers[1].client.report_failure(request).await.unwrap();
    let status = people.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.phase(), v1::RunPhase::Failed);
    assert_eq!(status.first_failure.unwrap().rank, Some(1));
    for worker in &mut fake_workers {
        worker.leave(5).await;
    }
    let Outcome::Failed(cause) = sandbox.outcome().await.unwrap() else { panic!("not failed") };
    assert_eq!(cause.to_string(), "rank 1: 9 GiB do not fit");
    assert_eq!(cause.kind, CauseKind::OutOfMemory);
}

#[tokio::test]
async fn a_lost_connection_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 1)).await;
    let mut first = sandbox.worker(0).await;
    first.begin().await;
    first.steps(0..4).await.unwrap();
    let id = first.id;
    // The same process comes back on another connection.
    let mut again = sandbox.worker(0).await;
    assert_eq!(again.id, id);
    assert_eq!(again.assigned().await, 0);
    let Kind::Lease(lease) = again.told().await else { panic!("not a lease") };
    assert_eq!((lease.first_step, lease.end_step), (4, 10));
    assert_eq!(again.steps(0..6).await.unwrap(), 6);
    assert!(again.beat(v1::WorkerPhase::Forward).await);
}
