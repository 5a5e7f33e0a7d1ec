//! Workers that speak for themselves: a stream and calls of each, on shared connections.

use std::time::{Duration, Instant};

use coxswain_proto::v1::{self, coordinator_client::CoordinatorClient, directive::Kind};
use tokio::{task::JoinSet, time::Instant as TokioInstant};
use tonic::{Status, transport::Channel};

use super::{Failure, Stage};

/// All workers.
pub async fn play(stage: Stage, address: &str) -> Result<JoinSet<Result<(), Status>>, Failure> {
    let mut channels = Vec::new();
    for _ in 0..stage.load.connections {
        channels.push(Channel::from_shared(format!("http://{address}"))?.connect().await?);
    }
    let mut workers = JoinSet::new();
    for rank in 0..stage.load.workers {
        let client = CoordinatorClient::new(channels[(rank % stage.load.connections) as usize].clone());
        workers.spawn(Worker { client, rank, stage: stage.clone() }.run());
    }
    Ok(workers)
}

/// One worker that trains nothing.
#[derive(Clone)]
struct Worker {
    client: CoordinatorClient<Channel>,
    rank: u32,
    stage: Stage,
}

impl Worker {
    async fn run(mut self) -> Result<(), Status> {
        let incarnation = format!("life-{}", self.rank);
        let worker_id =
            self.client.register(self.stage.claim(self.rank, &incarnation)).await?.into_inner().worker_id;
        let follow = v1::FollowRequest { worker_id, incarnation: incarnation.clone() };
        let mut line = self.client.follow(follow).await?.into_inner();
        // A worker lives from its registration on, also while ten thousand others are still coming.
        let beating = tokio::spawn(self.clone().beat(worker_id, incarnation.clone()));
        let ready = v1::ReadyRequest { worker_id, incarnation: incarnation.clone(), ..Default::default() };
        self.client.ready(ready).await?;
        let generation = loop {
            let told = line.message().await?.and_then(|directive| directive.kind);
            if let Some(Kind::Assignment(assignment)) = told {
                break assignment.generation;
            }
        };
        let start = v1::ReportStartRequest {
            worker_id,
            generation,
            source: v1::StateSource::Fresh.into(),
            ..Default::default()
        };
        self.client.report_start(start).await?;
        while !matches!(line.message().await?.and_then(|directive| directive.kind), Some(Kind::Lease(_))) {}
        self.stage.ready.wait().await;
        // The line is read to the end of the measurement, as a session does.
        let reading = tokio::spawn(async move { while let Ok(Some(_)) = line.message().await {} });
        let share = f64::from(self.rank) / f64::from(self.stage.load.workers);
        let begin = TokioInstant::now() + Duration::from_secs_f64(share);
        for second in 0..self.stage.load.seconds {
            tokio::time::sleep_until(begin + Duration::from_secs(second)).await;
            let steps = vec![self.stage.report(self.rank, generation, second)];
            let asked = Instant::now();
            self.client.report_steps(v1::ReportStepsRequest { worker_id, steps }).await?;
            self.stage.times.note(&self.stage.times.reports, asked);
        }
        reading.abort();
        beating.abort();
        Ok(())
    }

    /// "I live", every second, for ever.
    async fn beat(mut self, worker_id: u64, incarnation: String) -> Result<(), Status> {
        let mut clock = tokio::time::interval(Duration::from_secs(1));
        loop {
            clock.tick().await;
            let beat = v1::HeartbeatRequest {
                worker_id,
                incarnation: incarnation.clone(),
                generation: 1,
                phase: v1::WorkerPhase::Communication.into(),
                ..Default::default()
            };
            let asked = Instant::now();
            self.client.heartbeat(beat).await?;
            self.stage.times.note(&self.stage.times.heartbeats, asked);
        }
    }
}
