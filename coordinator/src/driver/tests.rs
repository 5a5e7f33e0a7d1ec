//! The driver with a journal that stands still: what was said meanwhile, and what could not be heard; and
//! callers that hang up.

use std::{pin::Pin, task::Poll, thread, time::Duration};

use coxswain_proto::ids::{Bytes, Generation, WorkerId};

use super::*;
use crate::{
    core::{
        event::{Beat, NodeClaim},
        report::WorkerPhase,
        tests::{claim, config},
    },
    journal::{Forgetful, Journal, JournalReader},
};

/// Stands still whenever an order of people is to be kept.
struct Slow(Duration);

impl Journal for Slow {
    fn append(&mut self, records: &[Record]) -> Result<(), JournalError> {
        if records.iter().any(|record| matches!(record, Record::Orders(_))) {
            thread::sleep(self.0);
        }
        Ok(())
    }

    fn reader(&self) -> Box<dyn JournalReader> {
        Forgetful::default().reader()
    }
}

/// A full disk: waits for room until the coordinator is stopped.
struct Full(CancellationToken);

impl Journal for Full {
    fn append(&mut self, _: &[Record]) -> Result<(), JournalError> {
        while !self.0.is_cancelled() {
            thread::yield_now();
        }
        Err(JournalError::Stopped { directory: "state".into() })
    }

    fn reader(&self) -> Box<dyn JournalReader> {
        Forgetful::default().reader()
    }
}

async fn beat(handle: &Handle, worker: WorkerId, rank: u32) -> Reply {
    let beat = Beat {
        worker,
        incarnation: claim(rank).incarnation.into(),
        age: Duration::ZERO,
        generation: Generation(0),
        phase: WorkerPhase::Loading,
        step: Step(0),
        collective: (0, 0),
        memory_in_use: Bytes(0),
        still: Duration::ZERO,
        in_phase: Duration::ZERO,
        paces: Vec::new(),
        waits: false,
    };
    handle.ask(Ask::Heartbeat(beat)).await.expect("a heartbeat is answered")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_stands_still_makes_nobody_lost() {
    let mut config = config(2);
    config.patience.hang = Duration::from_millis(600);
    let journal = JournalThread::spawn(Box::new(Slow(Duration::from_millis(1_500)))).expect("a thread");
    let (driver, handle) = Driver::new(config, journal, Log::new("demo", 1));
    let stop = CancellationToken::new();
    let running = tokio::spawn(driver.run(stop.clone()));
    let mut workers = Vec::new();
    for rank in 0..2 {
        let reply = handle.ask(Ask::Register(claim(rank))).await.expect("the slot is free");
        let Reply::Registered(id) = reply else { panic!("{reply:?}") };
        let line = handle.follow(id, claim(rank).incarnation).await.expect("a line");
        workers.push((id, rank, line));
    }
    for _ in 0..2 {
        handle.ask(Ask::CheckpointNow).await.expect("it is answered when it is on disk");
        for (id, rank, _) in &workers {
            assert_eq!(beat(&handle, *id, *rank).await, Reply::Known(true), "rank {rank}");
        }
    }
    let status = handle.status().await.expect("a status");
    assert_eq!(status.spent.restarts, 0);
    stop.cancel();
    assert!(matches!(running.await, Ok(Ok(Outcome::ShutDown { .. }))));
}

#[tokio::test]
async fn a_coordinator_that_is_stopped_while_its_disk_is_full_shuts_down() {
    let stop = CancellationToken::new();
    let journal = JournalThread::spawn(Box::new(Full(stop.clone()))).expect("a thread");
    let (driver, handle) = Driver::new(config(1), journal, Log::new("demo", 1));
    let running = tokio::spawn(driver.run(stop.clone()));
    let (asked, ()) = tokio::join!(handle.ask(Ask::Register(claim(0))), async {
        // On this thread the driver has run until it waits for the journal.
        tokio::task::yield_now().await;
        stop.cancel();
    });
    assert!(matches!(asked, Err(CallError::Gone)), "{asked:?}");
    assert!(matches!(running.await, Ok(Ok(Outcome::ShutDown { steps: Step(0) }))));
}

#[tokio::test]
async fn those_who_look_at_the_same_time_share_a_look_and_see_what_came_before() {
    let journal = JournalThread::spawn(Box::new(Forgetful::default())).expect("a thread");
    let (driver, handle) = Driver::new(config(1), journal, Log::new("demo", 1));
    let stop = CancellationToken::new();
    let running = tokio::spawn(driver.run(stop.clone()));
    for present in [0, 1] {
        let looks: Vec<_> = (0..8)
            .map(|_| {
                tokio::spawn({
                    let handle = handle.clone();
                    async move { handle.status().await }
                })
            })
            .collect();
        let mut seen = Vec::new();
        for look in looks {
            let status = look.await.expect("it ends").expect("a status");
            assert_eq!(status.workers.present, present);
            seen.push(status);
        }
        assert!(seen.iter().all(|status| std::sync::Arc::ptr_eq(status, &seen[0])), "one look");
        handle.ask(Ask::Register(claim(0))).await.expect("the slot is free, or its own");
    }
    stop.cancel();
    assert!(matches!(running.await, Ok(Ok(Outcome::ShutDown { .. }))));
}

/// A launcher on the machine that all of them are on.
fn launcher(node_id: &str) -> Ask {
    Ask::JoinNode(NodeClaim {
        origin: claim(0).origin,
        node_id: node_id.into(),
        host: "here".into(),
        local_world: 1,
        node_rank: None,
        returns: false,
    })
}

/// Lets a call wait for its answer.
async fn begin(mut call: Pin<&mut impl Future>) {
    let waits = std::future::poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_pending()));
    assert!(waits.await, "nobody answers yet");
}

#[tokio::test]
async fn a_launcher_that_hangs_up_while_its_line_is_opened_has_no_line() {
    let journal = JournalThread::spawn(Box::new(Forgetful::default())).expect("a thread");
    let (driver, handle) = Driver::new(config(1), journal, Log::new("demo", 1));
    {
        let (join, follow) = (handle.ask(launcher("first")), handle.follow_node("first".into()));
        tokio::pin!(join, follow);
        begin(join.as_mut()).await;
        begin(follow.as_mut()).await;
    }
    let stop = CancellationToken::new();
    let running = tokio::spawn(driver.run(stop.clone()));
    // From the same machine, and nobody's line is open at the only place: the one before must have died.
    let placed = handle.ask(launcher("second")).await;
    assert!(matches!(placed, Ok(Reply::Placed { node_rank: 0, .. })), "{placed:?}");
    stop.cancel();
    assert!(matches!(running.await, Ok(Ok(Outcome::ShutDown { .. }))));
}
