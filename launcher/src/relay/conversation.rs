//! One stream to the coordinator, from its opening to its end: what workers have said goes up in few
//! messages, and what comes down goes to whom it is for.
//!
//! Calls and closed lines go at once, steps a few milliseconds later with those of the other workers, and
//! heartbeats with the next steps, or once a second, the newest of each worker. More than one message is
//! never composed ahead: what cannot be sent yet gathers.

use std::{
    collections::{BTreeMap, HashMap},
    time::Instant,
};

use coxswain_proto::{
    limits::{HEARTBEAT_INTERVAL, NODE_GATHERING},
    v1::{self, NodeNews, NodeTold, Respawn, node_directive, rank_call::Kind},
};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::{clock, control::Access};

/// One thing that a worker has said.
#[derive(Debug)]
pub(super) enum Message {
    /// It lives; when it said so.
    Beat(v1::HeartbeatRequest, Instant),
    /// It finished steps.
    Steps(Steps),
    /// Something that is answered by itself.
    Call(CallOf),
    /// It has closed its line.
    Closed(u64),
}

/// Finished steps of one worker, and where it is told how many are committed.
#[derive(Debug)]
pub(super) struct Steps {
    pub(super) report: v1::ReportStepsRequest,
    pub(super) answer: oneshot::Sender<Result<u64, Status>>,
}

/// One worker's call.
#[derive(Debug)]
pub(super) struct CallOf {
    /// Names its answer, and the line if it opens one.
    pub(super) number: u64,
    pub(super) kind: Kind,
    pub(super) line: Option<LineOf>,
    pub(super) answer: oneshot::Sender<Result<(), Status>>,
}

/// A worker's line.
#[derive(Debug)]
pub(super) struct LineOf {
    pub(super) worker: u64,
    pub(super) directives: mpsc::Sender<v1::Directive>,
    /// The coordinator has opened it.
    pub(super) open: bool,
}

/// Who waits to be told how many steps are committed.
type Reporter = (u64, oneshot::Sender<Result<u64, Status>>);

/// The stream, and who waits for what.
pub(super) struct Conversation {
    up: mpsc::Sender<NodeNews>,
    down: Streaming<NodeTold>,
    orders: mpsc::Sender<Respawn>,
    outbox: Outbox,
    /// By the number of the message that their steps are in: workers, and where they are told.
    reported: HashMap<u64, Vec<Reporter>>,
    called: HashMap<u64, oneshot::Sender<Result<(), Status>>>,
    lines: HashMap<u64, LineOf>,
}

/// What is to go up next.
struct Outbox {
    news: NodeNews,
    /// Who reports the steps in it.
    steps: Vec<Reporter>,
    /// The newest of each worker.
    beats: BTreeMap<u64, (v1::HeartbeatRequest, Instant)>,
    /// When the steps in it are to go.
    steps_at: Option<Instant>,
    /// When beats are.
    beats_at: Instant,
    last: u64,
}

impl Conversation {
    /// Opens the stream; the coordinator may not know the node.
    pub(super) async fn open(
        access: &Access,
        node_id: &str,
        orders: mpsc::Sender<Respawn>,
    ) -> Result<Self, Status> {
        let (up, news) = mpsc::channel(1);
        let first = NodeNews { node_id: node_id.to_owned(), ..NodeNews::default() };
        // There is room for one.
        drop(up.try_send(first));
        let down = access.coordinator().speak_for_node(ReceiverStream::new(news)).await?.into_inner();
        let outbox = Outbox::new(clock::now());
        let (reported, called, lines) = (HashMap::new(), HashMap::new(), HashMap::new());
        Ok(Self { up, down, orders, outbox, reported, called, lines })
    }

    /// Speaks until the stream breaks. All who wait hear of that, and every worker's line ends with it.
    pub(super) async fn hold(mut self, unsent: &mut mpsc::Receiver<Message>) {
        let up = self.up.clone();
        loop {
            let now = clock::now();
            let (due, wake) = (self.outbox.is_due(now), self.outbox.next());
            tokio::select! {
                told = self.down.message() => match told {
                    Ok(Some(told)) => self.hear(told),
                    Ok(None) | Err(_) => return,
                },
                one = unsent.recv() => match one {
                    Some(one) => self.receive(one),
                    None => return,
                },
                room = up.reserve(), if due => match room {
                    Ok(room) => {
                        let (lines, reported) = (&self.lines, &mut self.reported);
                        room.send(self.outbox.compose(now, lines, reported));
                    }
                    Err(_) => return,
                },
                () = tokio::time::sleep_until(wake.into()), if !due => {}
            }
        }
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Beat(beat, at) => self.outbox.beat(beat, at),
            Message::Steps(Steps { report, answer }) => {
                // A worker that is gone, or says it again, does not wait for the answer any more.
                if !answer.is_closed() {
                    self.outbox.steps_at.get_or_insert_with(|| clock::now() + NODE_GATHERING);
                    self.outbox.steps.push((report.worker_id, answer));
                    self.outbox.news.steps.push(report);
                }
            }
            Message::Call(CallOf { number, kind, line, answer }) => {
                if !answer.is_closed() {
                    self.lines.extend(line.map(|line| (number, line)));
                    self.called.insert(number, answer);
                    self.outbox.news.calls.push(v1::RankCall { call: number, kind: Some(kind) });
                }
            }
            Message::Closed(number) => {
                if let Some(line) = self.lines.remove(&number) {
                    self.outbox.close(number, line.worker);
                }
            }
        }
    }

    fn hear(&mut self, told: NodeTold) {
        for v1::CallAnswer { call, code, message } in told.answers {
            let answered = match Code::from_i32(code) {
                Code::Ok => Ok(()),
                code => Err(Status::new(code, message)),
            };
            match (&answered, self.lines.get_mut(&call)) {
                (Ok(()), Some(line)) => line.open = true,
                (Err(_), Some(_)) => drop(self.lines.remove(&call)),
                (_, None) => {}
            }
            if let Some(answer) = self.called.remove(&call) {
                // A worker that is gone does not wait for it.
                drop(answer.send(answered));
            }
        }
        for v1::LineTold { lines, directive } in told.lines {
            for number in lines {
                self.pass_on(number, directive.as_ref());
            }
        }
        for v1::NodeHeard { number, committed_steps, refused } in told.heard {
            self.answer(number, committed_steps, &refused);
        }
        for order in told.orders {
            let Some(node_directive::Kind::Respawn(respawn)) = order.kind else { continue };
            // A launcher that is slow is told again on the next stream.
            if self.orders.try_send(respawn).is_err() {
                tracing::warn!("a directive could not be handed on; the coordinator sends it again");
            }
        }
    }

    /// What a worker is told goes down its line. One that does not read opens its line again.
    fn pass_on(&mut self, number: u64, directive: Option<&v1::Directive>) {
        let Some(line) = self.lines.get(&number) else { return };
        let told = directive.is_some_and(|directive| line.directives.try_send(directive.clone()).is_ok());
        if !told {
            self.lines.remove(&number);
        }
    }

    fn answer(&mut self, number: u64, committed: u64, refused: &[v1::RankRefused]) {
        for (worker, answer) in self.reported.remove(&number).unwrap_or_default() {
            let no = refused.iter().find(|refused| refused.worker_id == worker);
            let no = no.map(|no| Status::new(Code::from_i32(no.code), no.message.clone()));
            drop(answer.send(no.map_or(Ok(committed), Err)));
        }
        for no in refused {
            // It opens its line again, and hears the reason then.
            self.lines.retain(|_, line| line.worker != no.worker_id);
        }
    }
}

impl Outbox {
    fn new(now: Instant) -> Self {
        Self {
            news: NodeNews::default(),
            steps: Vec::new(),
            beats: BTreeMap::new(),
            steps_at: None,
            beats_at: now + HEARTBEAT_INTERVAL,
            last: 0,
        }
    }

    fn beat(&mut self, mut beat: v1::HeartbeatRequest, at: Instant) {
        // Known from the worker's line.
        beat.incarnation.clear();
        let worker = beat.worker_id;
        if let Some((before, _)) = self.beats.remove(&worker) {
            // What was news in a heartbeat that was answered is not said again.
            for pace in before.paces {
                match beat.paces.iter_mut().find(|newer| newer.phase == pace.phase) {
                    Some(newer) => newer.longest_ms = newer.longest_ms.max(pace.longest_ms),
                    None => beat.paces.push(pace),
                }
            }
        }
        self.beats.insert(worker, (beat, at));
    }

    /// A worker has closed its line; one that has not been asked for yet is not opened.
    fn close(&mut self, number: u64, worker: u64) {
        self.beats.remove(&worker);
        let asked_for = self.news.calls.len();
        self.news.calls.retain(|call| call.call != number);
        if self.news.calls.len() == asked_for {
            self.news.closed.push(number);
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        let urgent = !self.news.calls.is_empty() || !self.news.closed.is_empty();
        urgent || self.next() <= now
    }

    fn next(&self) -> Instant {
        self.steps_at.map_or(self.beats_at, |steps| steps.min(self.beats_at))
    }

    /// The next message: all that there is, and beats when it is their time or steps go anyway, of workers
    /// whose line is open.
    fn compose(
        &mut self,
        now: Instant,
        lines: &HashMap<u64, LineOf>,
        reported: &mut HashMap<u64, Vec<Reporter>>,
    ) -> NodeNews {
        let mut news = std::mem::take(&mut self.news);
        if self.beats_at <= now || !news.steps.is_empty() {
            self.beats_at = now + HEARTBEAT_INTERVAL;
            for line in lines.values().filter(|line| line.open) {
                let Some((beat, at)) = self.beats.remove(&line.worker) else { continue };
                let age_ms = now.saturating_duration_since(at).as_millis() as u32;
                news.beats.push(v1::RankBeat { beat: Some(beat), age_ms });
            }
        }
        self.steps_at = None;
        if !news.beats.is_empty() || !news.steps.is_empty() {
            self.last += 1;
            news.number = self.last;
            reported.insert(self.last, std::mem::take(&mut self.steps));
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn line(worker: u64, open: bool) -> LineOf {
        LineOf { worker, directives: mpsc::channel(1).0, open }
    }

    fn beat(worker_id: u64, paces: &[(i32, u64)]) -> v1::HeartbeatRequest {
        let paces =
            paces.iter().map(|(phase, longest_ms)| v1::PhasePace { phase: *phase, longest_ms: *longest_ms });
        v1::HeartbeatRequest {
            worker_id,
            incarnation: "life".into(),
            paces: paces.collect(),
            ..Default::default()
        }
    }

    #[test]
    fn the_newest_heartbeat_goes_up_with_its_age_and_all_that_was_news_before() {
        let begin = clock::now();
        let (mut outbox, mut reported) = (Outbox::new(begin), HashMap::new());
        let lines = HashMap::from([(1, line(7, true)), (2, line(8, false))]);
        outbox.beat(beat(7, &[(4, 100), (5, 30)]), begin);
        outbox.beat(beat(8, &[]), begin);
        outbox.beat(beat(7, &[(5, 20)]), begin + Duration::from_millis(400));
        assert!(!outbox.is_due(begin + Duration::from_millis(999)));
        let now = begin + HEARTBEAT_INTERVAL;
        assert!(outbox.is_due(now));
        let news = outbox.compose(now, &lines, &mut reported);
        let [told] = news.beats.as_slice() else { panic!("{news:?}") };
        let newest = told.beat.as_ref().expect("a heartbeat");
        assert_eq!((newest.worker_id, newest.incarnation.as_str(), told.age_ms), (7, "", 600));
        let paces: Vec<_> = newest.paces.iter().map(|pace| (pace.phase, pace.longest_ms)).collect();
        assert_eq!(paces, [(5, 30), (4, 100)]);
        // The other worker's line was not open; what it had to say is kept until it is.
        let open = HashMap::from([(2, line(8, true))]);
        let later = outbox.compose(now + HEARTBEAT_INTERVAL, &open, &mut reported);
        assert_eq!(later.beats.len(), 1);
    }

    #[test]
    fn heartbeats_go_with_steps_that_go_anyway_and_not_with_calls() {
        let begin = clock::now();
        let (mut outbox, mut reported) = (Outbox::new(begin), HashMap::new());
        let lines = HashMap::from([(1, line(7, true))]);
        outbox.beat(beat(7, &[]), begin);
        outbox.news.calls.push(v1::RankCall::default());
        assert!(outbox.compose(begin, &lines, &mut reported).beats.is_empty());
        outbox.news.steps.push(v1::ReportStepsRequest { worker_id: 7, steps: Vec::new() });
        let now = begin + Duration::from_millis(300);
        let news = outbox.compose(now, &lines, &mut reported);
        assert_eq!((news.beats.len(), news.steps.len()), (1, 1));
        assert_eq!(outbox.next(), now + HEARTBEAT_INTERVAL, "and not once more before");
    }

    #[test]
    fn a_line_that_is_closed_before_it_was_asked_for_is_not_opened() {
        let now = clock::now();
        let mut outbox = Outbox::new(now);
        let kind = Some(Kind::Follow(v1::FollowRequest::default()));
        outbox.news.calls.push(v1::RankCall { call: 1, kind });
        outbox.close(1, 7);
        assert!(!outbox.is_due(now), "there is nothing to say");
        outbox.close(2, 7);
        let news = outbox.compose(now, &HashMap::new(), &mut HashMap::new());
        assert_eq!((news.calls.len(), news.closed, news.number), (0, vec![2], 0));
    }
}
