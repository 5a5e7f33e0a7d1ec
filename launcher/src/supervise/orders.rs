//! What the coordinator orders this launcher to do with its workers: the standing line `FollowNode`, opened again when it breaks.
//!
//! A coordinator that lost sight of this launcher for too long has given up its place; the launcher then asks for it back. If another
//! launcher has it by now, this one has no business here any more and says so.

use std::time::{Duration, Instant};

use coxswain_proto::{
    limits,
    v1::{FollowNodeRequest, JoinNodeRequest, Respawn, node_directive::Kind},
};
use tokio::{sync::mpsc, task::JoinHandle};
use tonic::{Code, Status};

use crate::control::{Access, prompt};

/// Before a broken line is opened again, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Something the line says.
#[derive(Debug)]
pub enum Order {
    /// Another process in a worker's place.
    Respawn(Respawn),
    /// No coordinator has answered for as long as workers look for one.
    Unreachable,
    /// Another launcher has this one's place; why.
    Displaced(String),
}

/// The line; closed when this is dropped.
#[derive(Debug)]
pub struct Orders(JoinHandle<()>);

impl Drop for Orders {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Opens the line of the launcher that joined with `join` and was given `first_rank`; orders arrive at `orders`.
pub fn follow(access: Access, join: JoinNodeRequest, first_rank: u32, orders: mpsc::Sender<Order>) -> Orders {
    let line = Line { access, join, first_rank, orders };
    Orders(tokio::spawn(line.keep()))
}

struct Line {
    access: Access,
    join: JoinNodeRequest,
    first_rank: u32,
    orders: mpsc::Sender<Order>,
}

impl Line {
    async fn keep(self) {
        let (mut wait, mut heard) = (RETRY.0, Instant::now());
        loop {
            let last = match self.open_once().await {
                Ok(true) => {
                    (wait, heard) = (RETRY.0, Instant::now());
                    None
                }
                Ok(false) => return,
                Err(status) if status.code() == Code::NotFound => match self.ask_place_back().await {
                    Ok(()) => {
                        heard = Instant::now();
                        None
                    }
                    Err(last) => last,
                },
                Err(status) => {
                    // An answer, if not a welcome one: the run is over, say.
                    if !is_silence(&status) {
                        heard = Instant::now();
                    }
                    None
                }
            };
            let last = last
                .or_else(|| (heard.elapsed() > limits::COORDINATOR_PATIENCE).then_some(Order::Unreachable));
            if let Some(last) = last {
                // A launcher that no longer listens is ending.
                let _ = self.orders.send(last).await;
                return;
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(RETRY.1);
        }
    }

    /// Passes on what the line says until it breaks. False: nobody listens to us.
    async fn open_once(&self) -> Result<bool, Status> {
        let request = FollowNodeRequest { node_id: self.join.node_id.clone() };
        let mut line = self.access.coordinator().follow_node(request).await?.into_inner();
        while let Ok(Some(directive)) = line.message().await {
            let Some(Kind::Respawn(respawn)) = directive.kind else { continue };
            if self.orders.send(Order::Respawn(respawn)).await.is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Asks for our place again: ours still, not yet known, or (the error's value) another's.
    async fn ask_place_back(&self) -> Result<(), Option<Order>> {
        match self.access.coordinator().join_node(prompt(self.join.clone())).await {
            Ok(answer) if answer.get_ref().first_rank == self.first_rank => Ok(()),
            Ok(answer) => Err(Some(Order::Displaced(format!(
                "this launcher was given up, and its place is another's: its first worker would now be rank {}, not {}",
                answer.get_ref().first_rank,
                self.first_rank
            )))),
            Err(status) if is_silence(&status) => Err(None),
            Err(status) => Err(Some(Order::Displaced(format!(
                "this launcher was given up and is not taken back: {}",
                status.message()
            )))),
        }
    }
}

/// Whether nobody answered: the coordinator is away, or is just going.
pub fn is_silence(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown)
}
