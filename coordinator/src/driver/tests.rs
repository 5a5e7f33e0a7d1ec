//! The driver with a journal that stands still: what was said meanwhile, and what could not be heard.

use std::{thread, time::Duration};

use coxswain_proto::ids::{Bytes, Generation};

use super::*;
use crate::{
    core::{
        event::Beat,
        report::WorkerPhase,
        tests::{claim, config},
    },
    journal::Journal,
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

    fn ledger(&self, _: Step, _: usize) -> Result<Vec<LedgerEntry>, JournalError> {
        Ok(Vec::new())
    }
}

async fn beat(handle: &Handle, worker: WorkerId, rank: u32) -> Reply {
    let beat = Beat {
        worker,
        incarnation: claim(rank).incarnation,
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
    let (driver, handle) = Driver::new(config, journal, Log::new(1));
    let stop = CancellationToken::new();
    let running = tokio::spawn(driver.run(stop.clone()));
    let mut crew = Vec::new();
    for rank in 0..2 {
        let reply = handle.ask(Ask::Register(claim(rank))).await.expect("the seat is free");
        let Reply::Registered(id) = reply else { panic!("{reply:?}") };
        let line = handle.follow(id, claim(rank).incarnation).await.expect("a line");
        crew.push((id, rank, line));
    }
    for _ in 0..2 {
        handle.ask(Ask::CheckpointNow).await.expect("it is answered when it is on disk");
        for (id, rank, _) in &crew {
            assert_eq!(beat(&handle, *id, *rank).await, Reply::Known(true), "rank {rank}");
        }
    }
    let Ok(Reply::Status(status)) = handle.ask(Ask::Status).await else { panic!("no status") };
    assert_eq!(status.spent.restarts, 0);
    stop.cancel();
    assert!(matches!(running.await, Ok(Ok(Outcome::ShutDown { .. }))));
}
