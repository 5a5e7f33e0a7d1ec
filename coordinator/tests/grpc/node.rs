//! A launcher's one stream for the workers of its node, over a real socket.

use coxswain_coordinator::Outcome;
use coxswain_proto::{
    VERSION,
    run_spec::RunSpec,
    v1::{self, directive::Kind, rank_call},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::harness::{Sandbox, impatient, options, register, spec};

const NODE: &str = "launcher";

/// A launcher's stream, and what has come down it that no test has asked for yet.
struct Node {
    up: mpsc::Sender<v1::NodeNews>,
    down: Streaming<v1::NodeTold>,
    waiting: v1::NodeTold,
    last: u64,
}

impl Node {
    async fn join(sandbox: &Sandbox, workers: u32) -> Self {
        let join = v1::JoinNodeRequest {
            version: VERSION.into(),
            node_id: NODE.into(),
            host: "node-a".into(),
            local_world_size: workers,
            ..Default::default()
        };
        sandbox.workers().await.join_node(join).await.expect("there is a place");
        Self::speak(sandbox, NODE).await.expect("it has joined")
    }

    async fn speak(sandbox: &Sandbox, node_id: &str) -> Result<Self, Status> {
        let (up, news) = mpsc::channel(8);
        up.send(v1::NodeNews { node_id: node_id.into(), ..Default::default() }).await.expect("there is room");
        let down = sandbox.workers().await.speak_for_node(ReceiverStream::new(news)).await?.into_inner();
        Ok(Self { up, down, waiting: v1::NodeTold::default(), last: 0 })
    }

    async fn say(&self, news: v1::NodeNews) {
        self.up.send(news).await.expect("the stream is open");
    }

    /// The first thing of a kind that comes, or has come.
    async fn first<T>(&mut self, take: impl Fn(&mut v1::NodeTold) -> Option<T>) -> T {
        loop {
            if let Some(found) = take(&mut self.waiting) {
                return found;
            }
            let told = self.down.message().await.expect("a sound stream").expect("an open stream");
            self.waiting.heard.extend(told.heard);
            self.waiting.answers.extend(told.answers);
            self.waiting.lines.extend(told.lines);
            self.waiting.orders.extend(told.orders);
        }
    }

    async fn call(&mut self, kind: rank_call::Kind) -> v1::CallAnswer {
        self.last += 1;
        let calls = vec![v1::RankCall { call: self.last, kind: Some(kind) }];
        self.say(v1::NodeNews { calls, ..Default::default() }).await;
        self.first(|told| told.answers.pop()).await
    }

    async fn told(&mut self) -> v1::LineTold {
        self.first(|told| (!told.lines.is_empty()).then(|| told.lines.remove(0))).await
    }

    async fn heard(&mut self, news: v1::NodeNews) -> v1::NodeHeard {
        self.last += 1;
        self.say(v1::NodeNews { number: self.last, ..news }).await;
        self.first(|told| told.heard.pop()).await
    }
}

fn follow(worker_id: u64, rank: u32) -> rank_call::Kind {
    rank_call::Kind::Follow(v1::FollowRequest { worker_id, incarnation: register(rank).incarnation })
}

fn beat(worker_id: u64) -> v1::RankBeat {
    let phase = v1::WorkerPhase::Forward.into();
    v1::RankBeat { beat: Some(v1::HeartbeatRequest { worker_id, phase, ..Default::default() }), age_ms: 0 }
}

/// Two workers whose lines are 1 and 2, both ready.
async fn two_ready(sandbox: &Sandbox) -> (Node, [u64; 2]) {
    let mut node = Node::join(sandbox, 2).await;
    let mut ids = [0; 2];
    for (id, rank) in ids.iter_mut().zip(0..) {
        let claim = register(rank);
        *id = sandbox.workers().await.register(claim).await.expect("a free slot").into_inner().worker_id;
        assert_eq!(node.call(follow(*id, rank)).await.code, 0);
    }
    for (id, rank) in ids.into_iter().zip(0..) {
        let incarnation = register(rank).incarnation;
        let ready = v1::ReadyRequest { worker_id: id, incarnation, ..Default::default() };
        assert_eq!(node.call(rank_call::Kind::Ready(ready)).await.code, 0);
    }
    (node, ids)
}

/// A step of a world of two.
fn report(sandbox: &Sandbox, rank: u32, step: u64) -> v1::StepReport {
    use coxswain_proto::ids::{Rank, Step};
    let batch = sandbox.plan.batch(Step(step));
    let positions = batch.of_rank(Rank(rank), 2);
    v1::StepReport {
        generation: 1,
        step,
        epoch: batch.epoch,
        samples: vec![v1::SampleRange { begin: positions.start, end: positions.end }],
        loss_sum: 4.0,
        valid_count: 8.0,
        grad_norm: 1.0,
        tokens: 10,
        ..Default::default()
    }
}

#[tokio::test]
async fn two_workers_train_through_one_stream() {
    let dir = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(dir.path(), 2), 2)).await;
    let (mut node, ids) = two_ready(&sandbox).await;
    for line in [1, 2] {
        let told = node.told().await;
        let Some(Kind::Assignment(assignment)) = told.directive.and_then(|told| told.kind) else {
            panic!("not an assignment");
        };
        assert_eq!((told.lines, u64::from(assignment.rank) + 1), (vec![line], line));
    }
    for worker_id in ids {
        let source = v1::StateSource::Fresh.into();
        let start = v1::ReportStartRequest { worker_id, generation: 1, source, first_step: 0 };
        assert_eq!(node.call(rank_call::Kind::Start(start)).await.code, 0);
    }
    for _ in 0..2 {
        let told = node.told().await.directive.and_then(|told| told.kind);
        assert!(matches!(told, Some(Kind::Lease(_))), "{told:?}");
    }
    sandbox.people().await.pause(v1::PauseRequest {}).await.expect("the run goes on");
    let told = node.told().await;
    assert!(matches!(told.directive.and_then(|told| told.kind), Some(Kind::Pause(_))));
    assert_eq!(told.lines, [1, 2], "said once for both");
    let steps = |rank: u32| v1::ReportStepsRequest {
        worker_id: ids[rank as usize],
        steps: (0..2).map(|step| report(&sandbox, rank, step)).collect(),
    };
    let news = v1::NodeNews {
        steps: vec![steps(0), steps(1)],
        beats: vec![beat(ids[0]), beat(7)],
        ..Default::default()
    };
    let heard = node.heard(news).await;
    assert_eq!(heard.committed_steps, 2);
    let refused: Vec<_> = heard.refused.iter().map(|no| (no.worker_id, Code::from_i32(no.code))).collect();
    assert_eq!(refused, [(7, Code::NotFound)], "no line of it goes down this stream");
    for worker_id in ids {
        let leave = v1::LeaveRequest { worker_id, exit_code: 0, reason: "done".into() };
        sandbox.workers().await.leave(leave).await.expect("everyone may leave");
    }
    assert!(matches!(sandbox.outcome().await, Ok(Outcome::Finished { .. })));
}

#[tokio::test]
async fn what_one_worker_says_wrong_is_refused_to_it_alone() {
    let dir = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(dir.path(), 2), 2)).await;
    assert_eq!(Node::speak(&sandbox, NODE).await.err().map(|no| no.code()), Some(Code::NotFound));
    let (mut node, ids) = two_ready(&sandbox).await;
    let broken = v1::RankBeat {
        beat: Some(v1::HeartbeatRequest { worker_id: ids[0], phase: 99, ..Default::default() }),
        age_ms: 0,
    };
    let heard = node.heard(v1::NodeNews { beats: vec![broken, beat(ids[1])], ..Default::default() }).await;
    let refused: Vec<_> = heard.refused.iter().map(|no| (no.worker_id, Code::from_i32(no.code))).collect();
    assert_eq!(refused, [(ids[0], Code::InvalidArgument)]);
    assert_eq!(Code::from_i32(node.call(follow(7, 0)).await.code), Code::NotFound);
}

#[tokio::test]
async fn a_worker_whose_line_is_closed_is_lost_and_so_are_all_when_the_stream_ends() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(spec(dir.path(), 2), 2);
    options.patience = impatient();
    let sandbox = Sandbox::start(options).await;
    let (mut node, ids) = two_ready(&sandbox).await;
    node.say(v1::NodeNews { closed: vec![2], ..Default::default() }).await;
    let order = node.first(|told| told.orders.pop()).await;
    let Some(v1::node_directive::Kind::Respawn(respawn)) = order.kind else { panic!("not a respawn") };
    assert_eq!(respawn.rank, 1, "{}", respawn.reason);
    let heard = node.heard(v1::NodeNews { beats: vec![beat(ids[0])], ..Default::default() }).await;
    assert_eq!(heard.refused, []);
    drop(node);
    let mut node = Node::speak(&sandbox, NODE).await.expect("its place is kept");
    let mut ranks = [0; 2];
    for rank in &mut ranks {
        let order = node.first(|told| (!told.orders.is_empty()).then(|| told.orders.remove(0))).await;
        let Some(v1::node_directive::Kind::Respawn(respawn)) = order.kind else { panic!("not a respawn") };
        *rank = respawn.rank;
    }
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1]);
    sandbox.shut_down().await.expect("it ends in order");
}

#[tokio::test]
async fn a_launcher_that_was_asked_for_another_run_is_refused_with_the_keys_that_differ() {
    let dir = tempfile::tempdir().expect("a directory");
    let sandbox = Sandbox::start(options(spec(dir.path(), 4), 2)).await;
    let join = |asked_for: &RunSpec| v1::JoinNodeRequest {
        version: VERSION.into(),
        node_id: NODE.into(),
        host: "node-b".into(),
        local_world_size: 2,
        spec: Some(v1::RunSpecDocument::from(asked_for)),
        ..Default::default()
    };
    let mut other = spec(dir.path(), 4);
    other.run.seed = 8;
    let refused = sandbox.workers().await.join_node(join(&other)).await.expect_err("another run");
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("run.seed (7 there, 8 here)"), "{}", refused.message());
    // It may be longer, and the refused one has taken no place.
    let longer = spec(dir.path(), 9);
    sandbox.workers().await.join_node(join(&longer)).await.expect("the same run");
}
