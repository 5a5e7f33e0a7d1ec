//! What the coordinator orders this launcher to do with its workers: the standing line `FollowNode`, opened
//! again when it breaks.
//!
//! A coordinator that lost sight of this launcher for too long has given up its place; the launcher then asks
//! for it back. If another launcher has it by now, this one has no business here any more and says so.

use std::{sync::Arc, time::Duration};

use coxswain_proto::{
    calls::{self, Pauses},
    limits,
    v1::{FollowNodeRequest, JoinNodeRequest, Respawn, node_directive::Kind},
};
use tokio::{sync::mpsc, task::JoinHandle};
use tonic::{Code, Status};

use crate::{
    clock,
    control::{Access, prompt},
    relay::Relay,
};

/// Before a broken line is opened again.
const PAUSES: Pauses = Pauses::new(Duration::from_millis(50), Duration::from_secs(1));

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

/// How a launcher is told.
#[derive(Clone)]
pub struct LineTo {
    /// The coordinator.
    pub access: Access,
    /// Where this launcher speaks for its workers, if it does: their lines are on its own.
    pub relay: Option<Arc<Relay>>,
}

/// Opens the line of the launcher that joined with `join` and was given `first_rank`; orders arrive at
/// `orders`.
pub fn follow(to: LineTo, join: JoinNodeRequest, first_rank: u32, orders: mpsc::Sender<Order>) -> Orders {
    let line = Line { to, join, first_rank, orders, patience: limits::COORDINATOR_PATIENCE };
    Orders(tokio::spawn(line.keep()))
}

struct Line {
    to: LineTo,
    join: JoinNodeRequest,
    first_rank: u32,
    orders: mpsc::Sender<Order>,
    /// Silence after which the coordinator is taken to be gone.
    patience: Duration,
}

impl Line {
    /// Opens the line again and again, until the launcher no longer listens or its place is another's. That
    /// there is no answer is reported once in a while: whether that is the end is for the launcher to say,
    /// whose own coordinator may only be slow.
    async fn keep(self) {
        let (mut pauses, mut heard) = (PAUSES, clock::now());
        loop {
            match self.open_once().await {
                Ok(true) => (pauses, heard) = (PAUSES, clock::now()),
                Ok(false) => return,
                Err(status) if status.code() == Code::NotFound => match self.ask_place_back().await {
                    Ok(true) => heard = clock::now(),
                    Ok(false) => {}
                    // A launcher that no longer listens is ending.
                    Err(why) => return drop(self.orders.send(Order::Displaced(why)).await),
                },
                // An answer, if not a welcome one: the run is over, say.
                Err(status) if !calls::may_answer_later(status.code()) => heard = clock::now(),
                Err(_) => {}
            }
            if heard.elapsed() > self.patience {
                heard = clock::now();
                if self.orders.send(Order::Unreachable).await.is_err() {
                    return;
                }
            }
            tokio::time::sleep(pauses.take()).await;
        }
    }

    /// Passes on what the line says until it breaks. False: the launcher no longer listens.
    async fn open_once(&self) -> Result<bool, Status> {
        if let Some(relay) = &self.to.relay {
            return self.speak_once(relay).await;
        }
        let request = FollowNodeRequest { node_id: self.join.node_id.clone() };
        let mut line = self.to.access.coordinator().follow_node(request).await?.into_inner();
        while let Ok(Some(directive)) = line.message().await {
            let Some(Kind::Respawn(respawn)) = directive.kind else { continue };
            if self.orders.send(Order::Respawn(respawn)).await.is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Passes on what the stream says on which the launcher speaks for its workers, until it breaks.
    async fn speak_once(&self, relay: &Relay) -> Result<bool, Status> {
        let (told, mut respawns) = mpsc::channel(limits::MAX_NODE_WORKERS);
        let speaking = relay.speak(&self.join.node_id, told);
        tokio::pin!(speaking);
        loop {
            tokio::select! {
                ended = &mut speaking => return ended.map(|()| true),
                Some(respawn) = respawns.recv() => {
                    if self.orders.send(Order::Respawn(respawn)).await.is_err() {
                        return Ok(false);
                    }
                }
            }
        }
    }

    /// Asks for our place again. True: it is ours; false: not yet known. An error says that it is another's.
    async fn ask_place_back(&self) -> Result<bool, String> {
        match self.to.access.coordinator().join_node(prompt(self.join.clone())).await {
            Ok(answer) if answer.get_ref().first_rank == self.first_rank => Ok(true),
            Ok(answer) => Err(format!(
                "this launcher was declared lost and replaced: its first worker would now be rank {}, not {}",
                answer.get_ref().first_rank,
                self.first_rank
            )),
            Err(status) if calls::may_answer_later(status.code()) => Ok(false),
            Err(status) => {
                Err(format!("this launcher was declared lost and cannot rejoin: {}", status.message()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use coxswain_identity::Address;

    use super::*;

    #[tokio::test]
    async fn silence_is_reported_and_the_line_is_looked_for_all_the_same() {
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let access =
            Access::new(Address::parse(&nobody.local_addr().unwrap().to_string()), &Default::default())
                .unwrap();
        drop(nobody);
        let (orders, mut heard) = mpsc::channel(1);
        let join = JoinNodeRequest::default();
        let to = LineTo { access, relay: None };
        let line = Line { to, join, first_rank: 0, orders, patience: Duration::ZERO };
        let task = Orders(tokio::spawn(line.keep()));
        for _ in 0..3 {
            assert!(matches!(heard.recv().await, Some(Order::Unreachable)));
        }
        drop(task);
    }
}
