//! A launcher that speaks for the workers of its node: one stream each way, instead of a stream and calls of
//! each worker.
//!
//! ```text
//! NodeNews ─▶ beats and steps of all ─▶ one question to the core ─▶ NodeHeard
//!             calls                  ─▶ one each                  ─▶ CallAnswer      ─▶ NodeTold
//!             lines that are closed       what the core tells     ─▶ LineTold
//! ```
//!
//! One message at a time: the next is read when the one before is answered.

use std::time::Duration;

use coxswain_proto::{
    ids::WorkerId,
    limits::MAX_NODE_WORKERS,
    v1::{self, rank_call::Kind},
};
use tokio::{sync::mpsc, task::JoinSet};
use tonic::{Code, Status, Streaming};

use super::{
    decode, encode,
    fields::{FieldResult, at_most, name},
    shared::mismatch,
};
use crate::{
    core::{
        action::Reply,
        event::{Ask, NodeNews},
        refusal::Refusal,
    },
    driver::{CallError, Handle, NodeStream},
};

/// Messages on their way to a launcher; more wait with the driver.
const ANSWERS: usize = 4;

/// Opens the stream of the node that the first message names.
pub async fn listen(
    handle: Handle,
    mut news: Streaming<v1::NodeNews>,
) -> Result<mpsc::Receiver<Result<v1::NodeTold, Status>>, Status> {
    let first = news.message().await?.unwrap_or_default();
    let stream = handle.speak_for(name("node_id", first.node_id)?).await?;
    let (tell, told) = mpsc::channel(ANSWERS);
    tokio::spawn(Conversation { handle, stream, tell }.hold(news));
    Ok(told)
}

struct Conversation {
    handle: Handle,
    stream: NodeStream,
    tell: mpsc::Sender<Result<v1::NodeTold, Status>>,
}

impl Conversation {
    /// Until either side ends it.
    async fn hold(mut self, mut news: Streaming<v1::NodeNews>) {
        let mut batch = Vec::new();
        loop {
            let told = tokio::select! {
                () = self.tell.closed() => return,
                open = self.stream.told(&mut batch) => match open {
                    true => Ok(encode::node_told(batch.drain(..))),
                    false => return,
                },
                heard = news.message() => match heard {
                    Ok(Some(news)) => self.hear(news).await,
                    Ok(None) | Err(_) => return,
                },
            };
            let ends = told.is_err();
            if self.tell.send(told).await.is_err() || ends {
                return;
            }
        }
    }

    async fn hear(&mut self, news: v1::NodeNews) -> Result<v1::NodeTold, Status> {
        at_most(MAX_NODE_WORKERS, "beats", news.beats.len())?;
        at_most(MAX_NODE_WORKERS, "steps", news.steps.len())?;
        at_most(MAX_NODE_WORKERS, "calls", news.calls.len())?;
        news.closed.into_iter().for_each(|line| self.stream.close(line));
        let heard = match news.number {
            0 => None,
            number => Some(self.of_several(number, news.beats, news.steps).await?),
        };
        let answers = self.of_each(news.calls).await;
        Ok(v1::NodeTold { heard: heard.into_iter().collect(), answers, ..v1::NodeTold::default() })
    }

    /// Beats and steps. What one worker says wrong is refused to it alone.
    async fn of_several(
        &self,
        number: u64,
        beats: Vec<v1::RankBeat>,
        steps: Vec<v1::ReportStepsRequest>,
    ) -> Result<v1::NodeHeard, Status> {
        let (mut news, mut refused) = (NodeNews::default(), Vec::new());
        for beat in beats {
            let age = Duration::from_millis(beat.age_ms.into());
            let beat = beat.beat.unwrap_or_default();
            let worker = WorkerId(beat.worker_id);
            match self.stream.incarnation(worker) {
                None => refused.push(refusal(worker, &unknown(worker))),
                Some(incarnation) => {
                    keep(decode::beat(&beat, incarnation, age), worker, &mut news.beats, &mut refused);
                }
            }
        }
        for v1::ReportStepsRequest { worker_id, steps } in steps {
            let worker = WorkerId(worker_id);
            let steps = decode::step_reports(steps).map(|steps| (worker, steps));
            keep(steps, worker, &mut news.steps, &mut refused);
        }
        match self.handle.ask(Ask::Node(news)).await? {
            Reply::NodeHeard { committed, unknown: of } => {
                refused.extend(of.into_iter().map(|worker| refusal(worker, &unknown(worker))));
                Ok(v1::NodeHeard { number, committed_steps: committed.0, refused })
            }
            other => Err(mismatch(&other)),
        }
    }

    /// Calls, all at once.
    async fn of_each(&mut self, calls: Vec<v1::RankCall>) -> Vec<v1::CallAnswer> {
        let (mut asked, mut answers) = (JoinSet::new(), Vec::new());
        for v1::RankCall { call, kind } in calls {
            let ask: FieldResult<Ask> = match kind {
                Some(Kind::Follow(follow)) => {
                    answers.push(answer(call, self.follow(call, follow).await));
                    continue;
                }
                Some(Kind::Ready(ready)) => ready.try_into(),
                Some(Kind::Start(start)) => start.try_into(),
                None => {
                    answers.push(answer(call, Err(Status::unimplemented("a call of another cox version"))));
                    continue;
                }
            };
            match ask {
                Ok(ask) => {
                    let handle = self.handle.clone();
                    asked.spawn(async move { (call, handle.ask(ask).await) });
                }
                Err(error) => answers.push(answer(call, Err(error.into()))),
            }
        }
        while let Some(answered) = asked.join_next().await {
            // One that panicked has no answer; its caller hears when the stream ends.
            let Ok((call, reply)) = answered else { continue };
            answers.push(answer(call, reply.map(drop).map_err(Status::from)));
        }
        answers
    }

    async fn follow(&mut self, line: u64, follow: v1::FollowRequest) -> Result<(), Status> {
        at_most(MAX_NODE_WORKERS, "lines", self.stream.lines() + 1)?;
        let incarnation = name("incarnation", follow.incarnation)?;
        let worker = WorkerId(follow.worker_id);
        Ok(self.handle.follow_on(&mut self.stream, line, worker, incarnation).await?)
    }
}

/// Puts what could be read with the news, and refuses the rest.
fn keep<T>(read: FieldResult<T>, worker: WorkerId, news: &mut Vec<T>, refused: &mut Vec<v1::RankRefused>) {
    match read {
        Ok(read) => news.push(read),
        Err(error) => refused.push(refusal(worker, &error.into())),
    }
}

fn unknown(worker: WorkerId) -> Status {
    CallError::Refused(Refusal::UnknownWorker(worker)).into()
}

fn refusal(worker: WorkerId, why: &Status) -> v1::RankRefused {
    v1::RankRefused { worker_id: worker.0, code: why.code().into(), message: why.message().to_owned() }
}

fn answer(call: u64, answered: Result<(), Status>) -> v1::CallAnswer {
    let (code, message) = match answered {
        Ok(()) => (Code::Ok, String::new()),
        Err(why) => (why.code(), why.message().to_owned()),
    };
    v1::CallAnswer { call, code: code.into(), message }
}
