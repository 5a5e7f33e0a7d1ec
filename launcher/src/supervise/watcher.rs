//! Follows the run's events across broken connections.

use std::time::Duration;

use coxswain_proto::{
    calls::Pauses,
    v1::{WatchEvent, WatchRequest},
};
use tokio::{sync::mpsc, task::JoinHandle};

use crate::clock;
use crate::control::Access;

/// Before a broken stream is opened again: a coordinator that was killed is back within a tenth of a second,
/// and what it says first is what people wait for.
const PAUSES: Pauses = Pauses::new(Duration::from_millis(20), Duration::from_millis(300));

/// A task that is ended when this is dropped.
#[derive(Debug)]
pub struct Watcher(JoinHandle<()>);

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts to follow; events arrive at `events`, which ends when there was no answer for `patience`.
pub fn follow(access: Access, events: mpsc::Sender<WatchEvent>, patience: Duration) -> Watcher {
    Watcher(tokio::spawn(async move {
        let (mut heard, mut pauses) = (clock::now(), PAUSES);
        while heard.elapsed() < patience {
            if let Ok(stream) = access.control().watch(WatchRequest {}).await {
                let mut stream = stream.into_inner();
                while let Ok(Some(event)) = stream.message().await {
                    pauses.reset();
                    if events.send(event).await.is_err() {
                        return;
                    }
                }
                heard = clock::now();
            }
            tokio::time::sleep(pauses.take()).await;
        }
    }))
}
