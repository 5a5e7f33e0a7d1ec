//! The feature cache over gRPC: leases name their cache phase, a drift is waited for, a rebuild can be asked
//! for, all of it outlives the coordinator.

use std::path::Path;

use coxswain_coordinator::Options;
use coxswain_proto::v1::{self, directive::Kind, watch_event};
use tonic::Code;

use crate::harness::{FakeWorker, Sandbox, options, spec, successor};

/// Live for 2 of 8 steps, and rebuilt when features have moved by more than 0.05.
fn periodic(directory: &Path) -> Options {
    let mut spec = spec(directory, 100);
    spec.cache = serde_json::from_value(serde_json::json!({
        "mode": "periodic",
        "interval": {"steps": 8},
        "live": {"steps": 2},
        "rebuild_above": 0.05,
    }))
    .expect("the section is complete");
    let mut options = options(spec, 1);
    options.state_dir = Some(directory.join("state"));
    options
}

/// The next lease: its steps, and the generation that serves them.
async fn leased(worker: &mut FakeWorker) -> (std::ops::Range<u64>, u64) {
    let lease = loop {
        match worker.told().await {
            Kind::Lease(lease) => break lease,
            // A worker that opens its line again is told that the run goes on.
            Kind::Resume(_) => {}
            other => panic!("{other:?} is not a lease"),
        }
    };
    let serving = lease.cache_phase.and_then(|cache_phase| cache_phase.serving);
    (lease.first_step..lease.end_step, serving.map_or(0, |serving| serving.number))
}

/// Does the steps of one lease.
async fn follow(worker: &mut FakeWorker, (steps, generation): (std::ops::Range<u64>, u64)) {
    worker.cache_generation = generation;
    assert_eq!(worker.steps(steps.clone()).await.expect("they are leased"), steps.end);
}

async fn report(worker: &mut FakeWorker, report: v1::CacheReport) -> Result<(), tonic::Status> {
    let request = v1::ReportCacheRequest { worker_id: worker.id, report: Some(report) };
    worker.client.report_cache(request).await.map(drop)
}

fn drift(generation: u64, at_step: u64, relative_l2: f64) -> v1::CacheReport {
    let drift = Some(v1::CacheDrift { at_step, relative_l2, cosine: 1.0, probes: 4, ..Default::default() });
    v1::CacheReport { generation, drift, namespace: "5f".into(), stored: 12, total: 30, ..Default::default() }
}

async fn status(sandbox: &Sandbox) -> v1::CacheStatus {
    let mut people = sandbox.people().await;
    let status = people.get_status(v1::GetStatusRequest {}).await.expect("it is answered").into_inner();
    status.cache.expect("there is a cache")
}

#[tokio::test]
async fn cache_phases_come_with_leases_wait_for_their_drift_and_outlive_the_coordinator() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(periodic(directory.path())).await;
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    for expected in [(0..2, 0), (2..8, 1), (8..10, 0)] {
        let lease = leased(&mut worker).await;
        assert_eq!(lease, expected);
        follow(&mut worker, lease).await;
    }
    assert_eq!(status(&sandbox).await.waits_at, Some(10));
    sandbox.kill().await;

    let sandbox = successor(|| periodic(directory.path())).await;
    worker.follow_again(&sandbox.endpoint).await.unwrap();
    worker.assigned().await;
    report(&mut worker, drift(1, 10, 0.2)).await.unwrap();
    report(&mut worker, drift(1, 10, 0.2)).await.expect("a repeat is well");
    let lease = leased(&mut worker).await;
    assert_eq!(lease, (10..16, 2));
    follow(&mut worker, lease).await;
    let now = status(&sandbox).await;
    let states: Vec<_> = now.generations.iter().map(|of| (of.number, of.since_step, of.state())).collect();
    assert_eq!(states, [(1, 2, v1::CacheState::Retired), (2, 10, v1::CacheState::Building)]);
    let [measured] = &now.drifts[..] else { panic!("{now:?}") };
    assert_eq!((measured.then, measured.why.as_str()), (2, "drift 0.2 is above 0.05"));

    let ledger =
        sandbox.people().await.get_ledger(v1::GetLedgerRequest::default()).await.unwrap().into_inner();
    let generations: Vec<_> = ledger.steps.iter().map(|step| step.cache_generation).collect();
    assert_eq!(generations, [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2, 2, 2]);
    let refused = report(&mut worker, v1::CacheReport::default()).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::InvalidArgument, "report.generation: is 0, but generations of the cache count from 1")
    );
}

#[tokio::test]
async fn a_rebuild_is_asked_for_once_and_told_to_watchers() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(periodic(directory.path())).await;
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    let mut people = sandbox.people().await;
    let mut events = people.watch(v1::WatchRequest {}).await.unwrap().into_inner();
    let mut asked = Vec::new();
    for _ in 0..2 {
        let answer = people.rebuild_cache(v1::RebuildCacheRequest {}).await.unwrap().into_inner();
        asked.push((answer.generation, answer.from_step));
    }
    assert_eq!(asked, [(2, 10); 2], "where the wait for the drift would have been");
    let changed = loop {
        let event = events.message().await.unwrap().expect("the run goes on");
        if let Some(watch_event::Kind::Cache(changed)) = event.kind {
            break changed;
        }
    };
    assert_eq!((changed.generation, changed.step), (2, 10));
    assert_eq!(
        changed.what,
        "from step 10 on, steps use version 2 of the cached features: a rebuild was requested"
    );
}

#[tokio::test]
async fn without_a_cache_there_is_nothing_to_rebuild() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 1)).await;
    let refused = sandbox.people().await.rebuild_cache(v1::RebuildCacheRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(refused.message(), "there is no cache to rebuild: cache.mode is off");
}
