//! What people ask over gRPC.

use coxswain_coordinator::Outcome;
use coxswain_proto::{
    ids::Step,
    limits::{MAX_ERROR_TEXT, WATCH_QUEUE},
    v1::{self, directive::Kind, watch_event},
};

use crate::harness::{Sandbox, options, spec};

#[tokio::test]
async fn a_run_can_be_paused_resumed_checkpointed_and_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 100), 2)).await;
    let mut fake_workers = sandbox.fake_workers(2).await;
    let mut people = sandbox.people().await;
    for worker in &mut fake_workers {
        worker.begin().await;
        worker.steps(0..1).await.unwrap();
    }
    people.pause(v1::PauseRequest {}).await.unwrap();
    for worker in &mut fake_workers {
        assert_eq!(worker.ordered().await, Kind::Pause(v1::Pause {}));
        assert!(worker.beat(v1::WorkerPhase::Paused).await);
    }
    let status = people.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.phase(), status.committed_steps), (v1::RunPhase::Paused, 1));

    let resumed = people.resume(v1::ResumeRequest {}).await.unwrap().into_inner();
    assert_eq!(resumed.phase(), v1::RunPhase::Training);
    people.checkpoint(v1::CheckpointRequest {}).await.unwrap();
    let long = format!("enough{}", "!".repeat(2 * MAX_ERROR_TEXT));
    let cut = &long[..MAX_ERROR_TEXT];
    people.stop_run(v1::StopRunRequest { reason: long.clone() }).await.unwrap();
    for worker in &mut fake_workers {
        assert_eq!(worker.ordered().await, Kind::Resume(v1::Resume {}));
        assert_eq!(worker.ordered().await, Kind::Checkpoint(v1::CheckpointNow { request: 1 }));
        assert_eq!(worker.ordered().await, Kind::Stop(v1::Stop { reason: cut.into() }));
        worker.steps(1..2).await.unwrap();
    }
    for worker in &mut fake_workers {
        worker.leave(0).await;
    }
    let outcome = Outcome::Stopped { steps: Step(2), reason: cut.into() };
    assert_eq!(sandbox.outcome().await.unwrap(), outcome);
}

#[tokio::test]
async fn a_watcher_sees_the_status_first_and_then_every_event() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 2), 1)).await;
    let mut events = sandbox.people().await.watch(v1::WatchRequest {}).await.unwrap().into_inner();
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    worker.steps(0..2).await.unwrap();
    worker.leave(0).await;
    let mut seen = Vec::new();
    while let Some(event) = events.message().await.unwrap() {
        seen.push(match event.kind.unwrap() {
            watch_event::Kind::Status(status) => format!("status {:?}", status.phase()),
            watch_event::Kind::Step(step) => format!("step {} of {}", step.step, step.total_steps),
            watch_event::Kind::Phase(changed) => format!("{:?}", changed.phase()),
            watch_event::Kind::Membership(changed) => format!("{} there", changed.present),
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(
        seen,
        [
            "status WaitingForWorkers",
            "1 there",
            "WaitingForWorkers",
            "Starting",
            "Starting",
            "step 0 of 2",
            "step 1 of 2",
            "Stopping",
            "0 there",
            "Finished"
        ]
    );
    sandbox.outcome().await.unwrap();
}

#[tokio::test]
async fn a_slow_watcher_is_told_how_much_it_missed() {
    let directory = tempfile::tempdir().unwrap();
    let steps = 40_000;
    let sandbox = Sandbox::start(options(spec(directory.path(), steps), 1)).await;
    let mut events = sandbox.people().await.watch(v1::WatchRequest {}).await.unwrap().into_inner();
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    // More than the queue and the connection's windows hold.
    for step in (0..steps).step_by(16) {
        worker.steps(step..step + 16).await.unwrap();
    }
    worker.leave(0).await;
    let (mut told, mut missed) = (0, 0);
    while let Some(event) = events.message().await.unwrap() {
        match event.kind.unwrap() {
            watch_event::Kind::Step(_) => told += 1,
            watch_event::Kind::Missed(count) => missed += count,
            _ => {}
        }
    }
    assert!(missed > 0 && told >= WATCH_QUEUE as u64 / 2, "told {told}, missed {missed}");
    sandbox.outcome().await.unwrap();
}

#[tokio::test]
async fn the_memory_table_is_fresh_when_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 1)).await;
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    let mut people = sandbox.people().await;
    let asked = tokio::spawn(async move {
        people.get_memory(v1::GetMemoryRequest { refresh: true, reset: true }).await.unwrap().into_inner()
    });
    assert_eq!(worker.ordered().await, Kind::MemoryReport(v1::MemoryReportNow { request: 1, reset: 1 }));
    let peak = v1::PhaseMemory {
        phase: v1::WorkerPhase::Backward.into(),
        peak_in_use: 5,
        peak_reserved: 6,
        peak_driver: 7,
    };
    let report = v1::ReportMemoryRequest { worker_id: worker.id, phases: vec![peak], comparison: None };
    worker.client.report_memory(report).await.unwrap();
    let table = asked.await.unwrap();
    assert_eq!(table.ranks[0].phases, [peak]);
}

#[tokio::test]
async fn the_ledger_is_read_page_by_page() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 100), 2)).await;
    let mut fake_workers = sandbox.fake_workers(2).await;
    for worker in &mut fake_workers {
        worker.begin().await;
        worker.steps(0..5).await.unwrap();
    }
    let mut people = sandbox.people().await;
    let request = v1::GetLedgerRequest { first_step: 1, limit: 3 };
    let page = people.get_ledger(request).await.unwrap().into_inner();
    assert_eq!(page.steps.iter().map(|step| step.step).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(page.next_step, Some(4));
    // The last step of the first epoch has 30 - 3 * 8 = 6 samples.
    let last = &page.steps[2].ranks;
    assert_eq!(last[0].samples, [v1::SampleRange { begin: 24, end: 27 }]);
    assert_eq!(last[1].samples, [v1::SampleRange { begin: 27, end: 30 }]);
    let rest = v1::GetLedgerRequest { first_step: 4, limit: 0 };
    let page = people.get_ledger(rest).await.unwrap().into_inner();
    assert_eq!((page.steps.len(), page.next_step), (1, None));
}

#[tokio::test]
async fn a_shutdown_leaves_the_run_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 1)).await;
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    worker.steps(0..3).await.unwrap();
    assert_eq!(sandbox.shut_down().await.unwrap(), Outcome::ShutDown { steps: Step(3) });
}
