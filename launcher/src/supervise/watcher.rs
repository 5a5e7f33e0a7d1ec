//! Follows the run's events for as long as the launcher lives, across broken connections.

use std::time::Duration;

use coxswain_proto::v1::{WatchEvent, WatchRequest};
use tokio::{sync::mpsc, task::JoinHandle};

use crate::control::Access;

/// Before a broken stream is opened again.
const RETRY: Duration = Duration::from_millis(300);

/// A task that is ended when this is dropped.
#[derive(Debug)]
pub struct Watcher(JoinHandle<()>);

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts to follow; events arrive at `events`.
pub fn follow(access: Access, events: mpsc::Sender<WatchEvent>) -> Watcher {
    Watcher(tokio::spawn(async move {
        loop {
            if let Ok(stream) = access.control().watch(WatchRequest {}).await {
                let mut stream = stream.into_inner();
                while let Ok(Some(event)) = stream.message().await {
                    if events.send(event).await.is_err() {
                        return;
                    }
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }))
}
