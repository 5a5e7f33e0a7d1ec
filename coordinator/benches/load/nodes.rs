//! Launchers that speak for their workers: one connection and one stream for all workers of a node.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use coxswain_proto::v1::{self, NodeNews, coordinator_client::CoordinatorClient, directive::Kind, rank_call};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
    time::{Instant as TokioInstant, MissedTickBehavior},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming, transport::Channel};

use super::Stage;

/// Launchers that join at the same time.
const JOINING: usize = 64;

/// All launchers.
pub fn play(stage: Stage, address: &str) -> JoinSet<Result<(), Status>> {
    let (mut nodes, joining) = (JoinSet::new(), Arc::new(Semaphore::new(JOINING)));
    for place in 0..stage.load.workers / stage.load.node {
        let (stage, joining, address) = (stage.clone(), joining.clone(), format!("http://{address}"));
        nodes.spawn(async move {
            let one = joining.acquire().await.map_err(|_| Status::internal("it is never closed"))?;
            let node = Node::join(stage, place, address).await?;
            drop(one);
            node.run().await
        });
    }
    nodes
}

/// One launcher, with workers that train nothing.
struct Node {
    stage: Stage,
    place: u32,
    workers: Vec<u64>,
    up: mpsc::Sender<NodeNews>,
    down: Streaming<v1::NodeTold>,
    generation: u64,
    assigned: usize,
    leased: usize,
    /// Messages that are not answered: when they were sent, and whether steps are in them.
    sent: HashMap<u64, (Instant, bool)>,
    last: u64,
}

impl Node {
    /// Takes its place, opens its stream, and its workers their lines.
    async fn join(stage: Stage, place: u32, address: String) -> Result<Self, Status> {
        let unreachable = |error: tonic::transport::Error| Status::unavailable(error.to_string());
        let channel = Channel::from_shared(address).map_err(|error| Status::internal(error.to_string()))?;
        let mut client = CoordinatorClient::new(channel.connect().await.map_err(unreachable)?);
        let node_id = format!("launcher-{place}");
        let join = v1::JoinNodeRequest {
            version: coxswain_proto::VERSION.into(),
            node_id: node_id.clone(),
            host: format!("node{place}"),
            local_world_size: stage.load.node,
            node_rank: Some(place),
            ..Default::default()
        };
        client.join_node(join).await?;
        let (up, news) = mpsc::channel(4);
        let mut node_up = up.clone();
        send(&mut node_up, NodeNews { node_id, ..Default::default() }).await?;
        let down = client.speak_for_node(ReceiverStream::new(news)).await?.into_inner();
        // Workers of a node come at the same time.
        let mut coming = JoinSet::new();
        for local in 0..stage.load.node {
            let rank = place * stage.load.node + local;
            let (mut client, claim) = (client.clone(), stage.claim(rank, &incarnation(rank)));
            coming.spawn(async move {
                Ok::<_, Status>((rank, client.register(claim).await?.into_inner().worker_id))
            });
        }
        let mut workers = BTreeMap::new();
        while let Some(came) = coming.join_next().await {
            let (rank, worker) = came.map_err(|error| Status::internal(error.to_string()))??;
            workers.insert(rank, worker);
        }
        let (workers, sent) = (workers.into_values().collect(), HashMap::new());
        Ok(Self { stage, place, workers, up, down, generation: 0, assigned: 0, leased: 0, sent, last: 0 })
    }

    /// Trains for the time of the measurement.
    async fn run(mut self) -> Result<(), Status> {
        self.call(|worker_id, incarnation| {
            rank_call::Kind::Follow(v1::FollowRequest { worker_id, incarnation })
        })
        .await?;
        self.call(|worker_id, incarnation| {
            rank_call::Kind::Ready(v1::ReadyRequest { worker_id, incarnation, ..Default::default() })
        })
        .await?;
        // Workers live from their registration on, also while others are still coming.
        let nodes = f64::from(self.stage.load.workers / self.stage.load.node);
        let share = Duration::from_secs_f64(f64::from(self.place) / nodes);
        let mut beats = tokio::time::interval(Duration::from_secs(1));
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while self.leased < self.workers.len() {
            tokio::select! {
                _ = beats.tick() => self.beat().await?,
                told = self.down.message() => self.hear(told?).await?,
            }
        }
        let ready = self.stage.ready.clone();
        let all_ready = ready.wait();
        tokio::pin!(all_ready);
        loop {
            tokio::select! {
                _ = &mut all_ready => break,
                _ = beats.tick() => self.beat().await?,
                told = self.down.message() => self.hear(told?).await?,
            }
        }
        let begin = TokioInstant::now() + share;
        let mut second = 0;
        while second < self.stage.load.seconds {
            tokio::select! {
                told = self.down.message() => self.hear(told?).await?,
                () = tokio::time::sleep_until(begin + Duration::from_secs(second)) => {
                    self.report(second).await?;
                    second += 1;
                }
            }
        }
        // A node that has left would be missed while others are still at it.
        let done = self.stage.done.clone();
        let all_done = done.wait();
        tokio::pin!(all_done);
        loop {
            tokio::select! {
                _ = &mut all_done => return Ok(()),
                _ = beats.tick() => self.beat().await?,
                told = self.down.message() => self.hear(told?).await?,
            }
        }
    }

    /// A call of each worker, all in one message.
    async fn call(&mut self, kind: impl Fn(u64, String) -> rank_call::Kind) -> Result<(), Status> {
        let first = self.place * self.stage.load.node;
        let calls = (first..).zip(&self.workers).map(|(rank, worker)| {
            self.last += 1;
            v1::RankCall { call: self.last, kind: Some(kind(*worker, incarnation(rank))) }
        });
        let calls = calls.collect();
        send(&mut self.up, NodeNews { calls, ..Default::default() }).await
    }

    /// "They live."
    async fn beat(&mut self) -> Result<(), Status> {
        let beats = self.beats();
        self.say(NodeNews { beats, ..Default::default() }).await
    }

    fn beats(&self) -> Vec<v1::RankBeat> {
        let beats = self.workers.iter().map(|worker_id| {
            let beat = v1::HeartbeatRequest {
                worker_id: *worker_id,
                generation: self.generation,
                phase: v1::WorkerPhase::Communication.into(),
                ..Default::default()
            };
            v1::RankBeat { beat: Some(beat), age_ms: 0 }
        });
        beats.collect()
    }

    /// A step of each, and that they live.
    async fn report(&mut self, step: u64) -> Result<(), Status> {
        let first = self.place * self.stage.load.node;
        let steps = (first..).zip(&self.workers).map(|(rank, worker_id)| v1::ReportStepsRequest {
            worker_id: *worker_id,
            steps: vec![self.stage.report(rank, self.generation, step)],
        });
        let steps = steps.collect();
        let beats = self.beats();
        self.say(NodeNews { beats, steps, ..Default::default() }).await
    }

    async fn say(&mut self, news: NodeNews) -> Result<(), Status> {
        self.last += 1;
        self.sent.insert(self.last, (Instant::now(), !news.steps.is_empty()));
        send(&mut self.up, NodeNews { number: self.last, ..news }).await
    }

    async fn hear(&mut self, told: Option<v1::NodeTold>) -> Result<(), Status> {
        let told = told.ok_or_else(|| Status::unavailable("the stream has ended"))?;
        if let Some(refused) = told.answers.iter().find(|answer| answer.code != 0) {
            return Err(Status::internal(format!("a call was refused: {refused:?}")));
        }
        let times = &self.stage.times;
        for heard in told.heard {
            if let Some(refused) = heard.refused.first() {
                return Err(Status::internal(format!("a worker was refused: {refused:?}")));
            }
            let Some((asked, steps)) = self.sent.remove(&heard.number) else { continue };
            // Heartbeats are in all of them.
            times.note(&times.heartbeats, asked);
            if steps {
                times.note(&times.reports, asked);
            }
        }
        for line in told.lines {
            match line.directive.and_then(|directive| directive.kind) {
                Some(Kind::Assignment(assignment)) => {
                    self.generation = assignment.generation;
                    self.assigned += line.lines.len();
                    if self.assigned == self.workers.len() {
                        self.start().await?;
                    }
                }
                Some(Kind::Lease(_)) => self.leased += line.lines.len(),
                Some(Kind::Abort(abort)) => return Err(Status::aborted(abort.reason)),
                _ => {}
            }
        }
        Ok(())
    }

    async fn start(&mut self) -> Result<(), Status> {
        let generation = self.generation;
        self.call(move |worker_id, _| {
            let source = v1::StateSource::Fresh.into();
            rank_call::Kind::Start(v1::ReportStartRequest { worker_id, generation, source, first_step: 0 })
        })
        .await
    }
}

fn incarnation(rank: u32) -> String {
    format!("life-{rank}")
}

async fn send(up: &mut mpsc::Sender<NodeNews>, news: NodeNews) -> Result<(), Status> {
    up.send(news).await.map_err(|_| Status::unavailable("the stream has ended"))
}
