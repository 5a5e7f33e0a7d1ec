//! Follows a run: by its coordinator while that answers, by its files before and after.

use std::{path::Path, time::Duration};

use coxswain_proto::v1::{
    CheckpointRequest, DrainNodeRequest, GetMemoryRequest, GetStatusRequest, PauseRequest, ResumeRequest,
    StopRunRequest, drain_node_request::Node,
};
use tokio::{sync::mpsc, task::spawn_blocking, time};

use super::{app::ControlRequest, files};
use crate::{
    control::{Access, ledger_page, prompt},
    endpoint::Target,
    exit::CliError,
    log_tail::LogTail,
    supervise::watcher,
    view::{Source, Update},
};

/// Between two looks at a run's status, or at files that have not grown.
const LOOK: Duration = Duration::from_secs(1);
/// Between two looks at its memory.
const MEMORY: Duration = Duration::from_secs(5);
/// Events that wait for the screen.
const EVENTS: usize = 256;
/// The reason that is kept in the run's log.
const REASON: &str = "requested in cox top";

/// One run, and the screen's ends of what is told of it.
pub struct Follower {
    /// Number on the screen.
    pub number: usize,
    /// Where it is.
    pub target: Target,
    /// What is learned of it.
    pub updates: mpsc::Sender<(usize, Update)>,
    /// What it is told.
    pub orders: mpsc::Receiver<ControlRequest>,
}

/// The screen is gone.
struct LostScreen;

impl Follower {
    /// Follows the run until the screen is gone.
    pub async fn follow(mut self) {
        // The screen's end is this task's only one.
        while self.once().await.is_ok() {}
    }

    async fn once(&mut self) -> Result<(), LostScreen> {
        match self.target.access().await {
            Ok(access) => self.by_coordinator(&access).await,
            Err(why) => self.by_files(why.message.unwrap_or_default()).await,
        }
    }

    async fn tell(&self, update: Update) -> Result<(), LostScreen> {
        self.updates.send((self.number, update)).await.map_err(|_| LostScreen)
    }

    /// Until the coordinator no longer answers.
    async fn by_coordinator(&mut self, access: &Access) -> Result<(), LostScreen> {
        let Ok(status) = status_of(access).await else {
            time::sleep(LOOK).await;
            return Ok(());
        };
        self.tell(Update::Source(Source::Coordinator)).await?;
        // A screen that shows how the run stands need not wait for its past.
        self.tell(status).await?;
        self.tell_the_past(access).await?;
        let (told, mut events) = mpsc::channel(EVENTS);
        let _watcher = watcher::follow(access.clone(), told, LOOK);
        let (mut look, mut memory) = (time::interval(LOOK), time::interval(MEMORY));
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.tell(Update::Event(Box::new(event))).await?,
                    None => return Ok(()),
                },
                _ = look.tick() => match status_of(access).await {
                    Ok(status) => self.tell(status).await?,
                    // The events end, too, if it is gone for good.
                    Err(why) => self.tell(Update::Message(why.message.unwrap_or_default())).await?,
                },
                _ = memory.tick() => {
                    let asked = GetMemoryRequest { refresh: false, reset: false };
                    let answer =
                        access.look(|mut people| async move { people.get_memory(prompt(asked)).await }).await;
                    if let Ok(memory) = answer {
                        self.tell(Update::Memory(Box::new(memory))).await?;
                    }
                }
                Some(order) = self.orders.recv() => {
                    let message = given(access, order).await.unwrap_or_else(|why| why.message.unwrap_or_default());
                    self.tell(Update::Message(message)).await?;
                }
            }
        }
    }

    /// What the run has done before: losses by its ledger, all else by its log, if that is here.
    async fn tell_the_past(&self, access: &Access) -> Result<(), LostScreen> {
        let mut next = Some(0);
        while let Some(first_step) = next {
            let Ok(page) = ledger_page(access, first_step).await else { break };
            let learned = page.steps.iter().filter(|row| row.skipped.is_none());
            self.tell(Update::Losses(learned.map(|row| (row.step + 1, row.loss)).collect())).await?;
            // A page that does not get on would never end.
            next = page.next_step.filter(|next| *next > first_step);
        }
        match self.log() {
            Some(mut log) => self.tell_the_log(&mut log).await,
            None => Ok(()),
        }
    }

    /// All that a log has and has not told before: a piece at a time, with the screen's turn between them.
    async fn tell_the_log(&self, log: &mut LogTail) -> Result<(), LostScreen> {
        loop {
            // A log that cannot be read is as good as none.
            let lines = log.lines().unwrap_or_default();
            if lines.is_empty() {
                return Ok(());
            }
            self.tell(Update::Logged(lines)).await?;
            tokio::task::yield_now().await;
        }
    }

    /// Until a coordinator answers.
    async fn by_files(&mut self, why: String) -> Result<(), LostScreen> {
        let (Some(dir), Some(mut log)) = (self.target.run_dir().map(Path::to_owned), self.log()) else {
            self.tell(Update::Source(Source::Nothing(why))).await?;
            time::sleep(LOOK).await;
            return Ok(());
        };
        // What the log does not tell by then is the journal's.
        let (status, losses) = spawn_blocking(move || files::status(&dir)).await.unwrap_or_default();
        let why = if status.phase == 0 { why } else { status.reason.clone() };
        self.tell(Update::Source(Source::Files(why))).await?;
        self.tell(Update::Status(Box::new(status))).await?;
        self.tell(Update::Losses(losses)).await?;
        self.tell_the_log(&mut log).await?;
        while self.target.access().await.is_err() {
            self.tell_the_log(&mut log).await?;
            // An order that came too late.
            while self.orders.try_recv().is_ok() {}
            if self.updates.is_closed() {
                return Err(LostScreen);
            }
            time::sleep(LOOK).await;
        }
        Ok(())
    }

    fn log(&self) -> Option<LogTail> {
        let dir = self.target.run_dir()?;
        Some(LogTail::new(dir.join("logs/coordinator.log")))
    }
}

async fn status_of(access: &Access) -> Result<Update, CliError> {
    let status =
        access.look(|mut people| async move { people.get_status(prompt(GetStatusRequest {})).await }).await?;
    Ok(Update::Status(Box::new(status)))
}

/// Gives an order; what became of it.
async fn given(access: &Access, order: ControlRequest) -> Result<String, CliError> {
    let message = match order {
        ControlRequest::Pause => {
            access.answer(async |mut people| people.pause(prompt(PauseRequest {})).await).await?;
            "it pauses at the next step boundary".to_owned()
        }
        ControlRequest::Resume => {
            access.answer(async |mut people| people.resume(prompt(ResumeRequest {})).await).await?;
            "it resumes".to_owned()
        }
        ControlRequest::Checkpoint => {
            access.answer(async |mut people| people.checkpoint(prompt(CheckpointRequest {})).await).await?;
            "a checkpoint will be written at the next step boundary".to_owned()
        }
        ControlRequest::Drain(node) => {
            let request = DrainNodeRequest { node: Some(Node::NodeRank(node)), reason: REASON.to_owned() };
            access.answer(async |mut people| people.drain_node(prompt(request)).await).await?;
            format!("node {node} leaves at the next step boundary")
        }
        ControlRequest::Stop => {
            let request = StopRunRequest { reason: REASON.to_owned() };
            access.answer(async |mut people| people.stop_run(prompt(request)).await).await?;
            "it finishes its step, writes a checkpoint and ends".to_owned()
        }
    };
    Ok(message)
}
