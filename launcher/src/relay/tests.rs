//! Workers that call a launcher, and a coordinator in this process that it calls for them.

use std::{path::PathBuf, time::Duration};

use coxswain_coordinator::{Options, World};
use coxswain_identity::{Address, CertificateFiles, Door, ShowToken, Token, Whereabouts};
use coxswain_proto::{
    VERSION,
    run_spec::RunSpec,
    v1::{self, coordinator_client::CoordinatorClient, directive::Kind},
};
use tonic::{
    Code,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

use super::*;

type Worker = CoordinatorClient<InterceptedService<Channel, ShowToken>>;

fn credentials(scope: Scope) -> Credentials {
    Credentials::new(Some(Tokens::one(Token::fresh(scope).unwrap())), CertificateFiles::default())
}

/// A coordinator of two workers at an address, which an earlier one may just be about to leave.
fn coordinator(address: String, credentials: Credentials, dir: PathBuf) -> JoinHandle<()> {
    let spec: RunSpec = serde_json::from_value(serde_json::json!({
        "run": {"name": "relayed", "output_dir": dir.join("out"), "seed": 7},
        "model": {"path": "none"},
        "data": {"path": "none", "cameras": ["front"]},
        "train": {"steps": 4, "global_batch": 8, "micro_batch": 2},
    }))
    .unwrap();
    let state = dir.join("state");
    let restarted = state.exists();
    tokio::spawn(async move {
        loop {
            let Ok(listener) = TcpListener::bind(&address).await else { continue };
            let mut options = Options::new(spec.clone(), World::fixed(1, 2));
            options.state_dir = Some(state.clone());
            options.restarted = restarted;
            options.door = Door::new(&credentials, true).unwrap();
            // The journal may not be let go yet.
            let _ = coxswain_coordinator::serve(listener, options, std::future::pending()).await;
            tokio::task::yield_now().await;
        }
    })
}

fn worker(relay: &Relay, credentials: &Credentials) -> Worker {
    let endpoint = Endpoint::from_shared(format!("http://{}", relay.address())).unwrap();
    let there = Whereabouts::fixed(relay.address().clone());
    let channel = coxswain_identity::channel(&endpoint, &there, credentials, Scope::Worker).unwrap();
    CoordinatorClient::with_interceptor(channel, credentials.for_scope(Scope::Worker))
}

fn claim(rank: u32) -> v1::RegisterRequest {
    v1::RegisterRequest {
        version: VERSION.into(),
        incarnation: format!("life-{rank}"),
        host: "here".into(),
        pid: rank + 1,
        rank,
        data_address: "127.0.0.1:1".into(),
        device: "cpu".into(),
        training_samples: 30,
        dataset_fingerprint: "f00d".into(),
        ..Default::default()
    }
}

/// Speaks until it is told nothing any more, as a launcher does.
fn keep_speaking(relay: Arc<Relay>) -> JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            let (orders, _told) = mpsc::channel(8);
            let _ = relay.speak("launcher", orders).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
}

/// A line of a worker, once the coordinator can be reached.
async fn follow(worker: &mut Worker, worker_id: u64, rank: u32) -> tonic::Streaming<v1::Directive> {
    loop {
        let request = v1::FollowRequest { worker_id, incarnation: claim(rank).incarnation };
        match worker.follow(request).await {
            Ok(line) => return line.into_inner(),
            Err(why) => assert_eq!(why.code(), Code::Unavailable, "{why}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn workers_train_through_their_launcher_and_find_the_next_coordinator_through_it() {
    let dir = tempfile::tempdir().unwrap();
    let shown = credentials(Scope::Worker);
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let first = coordinator(address.clone(), shown.clone(), dir.path().into());
    let access = Access::to(&Whereabouts::fixed(Address::parse(&address)), &shown).unwrap();
    let join = v1::JoinNodeRequest {
        version: VERSION.into(),
        node_id: "launcher".into(),
        host: "here".into(),
        local_world_size: 2,
        ..Default::default()
    };
    while access.coordinator().join_node(join.clone()).await.is_err() {
        tokio::task::yield_now().await;
    }
    let relay = Relay::start(access, &shown).await.unwrap();
    let speaking = keep_speaking(relay.clone());
    let mut ranks = Vec::new();
    for rank in 0..2 {
        let mut worker = worker(&relay, &shown);
        let worker_id = worker.register(claim(rank)).await.unwrap().into_inner().worker_id;
        let line = follow(&mut worker, worker_id, rank).await;
        let incarnation = claim(rank).incarnation;
        worker.ready(v1::ReadyRequest { worker_id, incarnation, ..Default::default() }).await.unwrap();
        ranks.push((worker, worker_id, line));
    }
    for (rank, (worker, worker_id, line)) in ranks.iter_mut().enumerate() {
        let Some(Kind::Assignment(place)) = line.message().await.unwrap().unwrap().kind else {
            panic!("no place")
        };
        assert_eq!((place.rank as usize, place.world_size), (rank, 2));
        let beat = v1::HeartbeatRequest {
            worker_id: *worker_id,
            phase: v1::WorkerPhase::Connecting.into(),
            ..Default::default()
        };
        assert!(worker.heartbeat(beat).await.unwrap().into_inner().known);
    }
    first.abort();
    assert!(first.await.is_err(), "it was killed");
    let second = coordinator(address, shown.clone(), dir.path().into());
    for (rank, (worker, worker_id, line)) in ranks.iter_mut().enumerate() {
        while let Ok(Some(_)) = line.message().await {}
        let mut line = follow(worker, *worker_id, rank as u32).await;
        let Some(Kind::Assignment(place)) = line.message().await.unwrap().unwrap().kind else {
            panic!("no place")
        };
        assert_eq!(place.rank as usize, rank);
        let source = v1::StateSource::Fresh.into();
        let start = v1::ReportStartRequest { worker_id: *worker_id, generation: 1, source, first_step: 0 };
        worker.report_start(start).await.unwrap();
    }
    speaking.abort();
    second.abort();
}

#[tokio::test]
async fn a_launcher_listens_to_workers_of_its_run_alone() {
    let shown = credentials(Scope::Worker);
    let nowhere = Access::new(Address::parse("127.0.0.1:1"), &shown).unwrap();
    let relay = Relay::start(nowhere, &shown).await.unwrap();
    let get_run = |credentials: &Credentials| {
        let mut worker = worker(&relay, credentials);
        async move { worker.get_run(v1::GetRunRequest::default()).await.unwrap_err().code() }
    };
    assert_eq!(get_run(&credentials(Scope::Worker)).await, Code::Unauthenticated);
    assert_eq!(get_run(&Credentials::default()).await, Code::Unauthenticated);
    assert_eq!(get_run(&shown).await, Code::Unavailable, "it is let in, and there is no coordinator");
    let mut launcher = worker(&relay, &shown);
    let join = launcher.join_node(v1::JoinNodeRequest::default()).await;
    assert_eq!(join.unwrap_err().code(), Code::Unimplemented);
}
