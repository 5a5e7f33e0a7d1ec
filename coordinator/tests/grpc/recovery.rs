//! Faults over real sockets: the lost worker's launcher is asked for another, and training goes on.

use std::time::Duration;

use coxswain_coordinator::Outcome;
use coxswain_proto::{
    VERSION,
    ids::Step,
    v1::{self, directive::Kind, node_directive},
};
use tonic::{Code, Streaming};

use crate::harness::{FakeWorker, Sandbox, options, register, spec};

/// Joins as a launcher; its line.
async fn launcher(sandbox: &Sandbox, workers: u32) -> Streaming<v1::NodeDirective> {
    let mut client = sandbox.workers().await;
    let request = v1::JoinNodeRequest {
        version: VERSION.into(),
        node_id: "launcher".into(),
        host: "node-a".into(),
        local_world_size: workers,
        ..Default::default()
    };
    client.join_node(request).await.unwrap();
    let follow = v1::FollowNodeRequest { node_id: "launcher".into() };
    client.follow_node(follow).await.unwrap().into_inner()
}

async fn respawn(line: &mut Streaming<v1::NodeDirective>) -> v1::Respawn {
    let told = tokio::time::timeout(Duration::from_secs(20), line.message()).await;
    let Some(node_directive::Kind::Respawn(respawn)) = told.unwrap().unwrap().unwrap().kind else {
        panic!("not a respawn")
    };
    respawn
}

#[tokio::test]
async fn training_goes_on_after_a_worker_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 2)).await;
    let mut line = launcher(&sandbox, 2).await;
    let mut fake_workers = sandbox.fake_workers(2).await;
    for worker in &mut fake_workers {
        worker.begin().await;
        worker.steps(0..4).await.unwrap();
    }
    let mut gone = fake_workers.pop().unwrap();
    let exit = v1::ReportExitRequest {
        node_id: "launcher".into(),
        rank: 1,
        pid: 101,
        ended: Some(v1::report_exit_request::Ended::Signal(9)),
        sample: None,
        out_of_memory: false,
    };
    sandbox.workers().await.report_exit(exit).await.unwrap();
    let asked = respawn(&mut line).await;
    assert_eq!((asked.rank, asked.attempt), (1, 1));
    let Kind::Abort(abort) = fake_workers[0].ordered().await else { panic!("not an abort") };
    assert_eq!((abort.generation, abort.over), (1, false));
    fake_workers[0].ready(1, "").await.unwrap();
    // The old process is not heard any more.
    assert!(!gone.beat(v1::WorkerPhase::Forward).await);
    assert_eq!(gone.ready(1, "").await.unwrap_err().code(), Code::NotFound);

    let mut claim = register(1);
    (claim.incarnation, claim.pid) = ("life-1-again".into(), 201);
    fake_workers.push(FakeWorker::join(sandbox.workers().await, sandbox.plan, claim).await.unwrap());
    for worker in &mut fake_workers {
        worker.assigned().await;
        assert_eq!(worker.generation, 2);
    }
    for worker in &mut fake_workers {
        worker.starts(4, v1::StateSource::Replica).await;
    }
    for worker in &mut fake_workers {
        worker.steps(4..10).await.unwrap();
    }
    let mut people = sandbox.people().await;
    let status = people.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.restarts, status.max_restarts, status.committed_steps), (1, 3, 10));
    let failure = status.first_failure.unwrap();
    assert_eq!((failure.rank, failure.fatal), (Some(1), false));
    let ledger = people.get_ledger(v1::GetLedgerRequest::default()).await.unwrap().into_inner();
    let generations: Vec<_> = ledger.steps.iter().map(|step| step.generation).collect();
    assert_eq!(generations, [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
    for worker in &mut fake_workers {
        worker.leave(0).await;
    }
    assert_eq!(sandbox.outcome().await.unwrap(), Outcome::Finished { steps: Step(10) });
}

#[tokio::test]
async fn a_launcher_that_has_not_joined_has_no_line() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 2)).await;
    let follow = v1::FollowNodeRequest { node_id: "stranger".into() };
    let refused = sandbox.workers().await.follow_node(follow).await.err().unwrap();
    assert_eq!(refused.code(), Code::NotFound);
}
