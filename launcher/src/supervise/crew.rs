//! The launcher at work: starts the processes, feeds the machine, does what it decides, and waits for everything to end.

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

use coxswain_proto::v1::{
    ReportExitRequest, StopRunRequest, WatchEvent, report_exit_request, watch_event::Kind,
};
use tokio::sync::mpsc;

use super::{
    child::Program,
    console::{Console, Terminal},
    host,
    keeper::{self, Keeper, Output, Sink},
    machine::{Action, Ended, Event, Machine},
    report::{FailedWorker, Log, Report},
    signals, watcher,
};
use crate::{
    control::{Access, prompt},
    launch::{plan, streams::Route, worker_env::Common},
    render::events,
};

/// News waiting for the launcher: watch events are the most frequent, a few for each step.
const NEWS: usize = 256;
/// How long the coordinator may take to end after this machine's workers have, once the run has gone wrong or is alone here.
const FAREWELL: Duration = coxswain_proto::limits::FAREWELL_TIMEOUT.saturating_add(Duration::from_secs(5));

/// The workers of one launcher.
pub struct Crew {
    /// Their place and environment.
    pub common: Common,
    /// What each runs; the environment of its place is added.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Where their output goes.
    pub output: plan::Output,
    /// How long they may take to leave after a signal.
    pub stop_patience: Duration,
    /// This machine.
    pub host: String,
    /// Names this launcher to the coordinator.
    pub node_id: String,
}

/// What the launcher is in touch with while its workers run.
pub struct Contacts {
    /// The coordinator.
    pub access: Access,
    /// Its process, if it is ours, and how it ends.
    pub coordinator: Option<(Keeper, mpsc::Receiver<Ended>)>,
    /// Signals to the launcher.
    pub signals: mpsc::Receiver<i32>,
    /// The user.
    pub terminal: Arc<Terminal>,
}

/// A started worker.
struct Started {
    keeper: Keeper,
    log: Option<Log>,
}

/// One thing the launcher hears.
enum News {
    Worker(u32, Ended),
    Coordinator(Ended),
    Signal(i32),
    Watched(Box<WatchEvent>),
    StopRefused(String),
    Tick,
}

/// Everything in motion.
struct Voyage<'a> {
    crew: &'a Crew,
    contacts: Contacts,
    machine: Machine,
    workers: BTreeMap<u32, Started>,
    ends: mpsc::Receiver<(u32, Ended)>,
    events: mpsc::Receiver<WatchEvent>,
    refusals: (mpsc::Sender<String>, mpsc::Receiver<String>),
    report: Report,
    /// When a coordinator that does not end is ended.
    farewell: Option<Instant>,
}

/// Starts the workers and returns when they, and a coordinator of ours, have ended.
pub async fn run(crew: &Crew, contacts: Contacts) -> io::Result<Report> {
    let begin = Instant::now();
    let (watched, events) = mpsc::channel(NEWS);
    let _watcher = watcher::follow(contacts.access.clone(), watched);
    let (ended, ends) = mpsc::channel(NEWS);
    let mut workers = BTreeMap::new();
    for local in 0..crew.common.place.nproc {
        workers.insert(local, crew.start(local, &contacts.terminal, ended.clone())?);
    }
    let machine = Machine::new(crew.common.place.nproc, crew.stop_patience);
    let refusals = mpsc::channel(4);
    let mut voyage = Voyage {
        crew,
        contacts,
        machine,
        workers,
        ends,
        events,
        refusals,
        report: Report::default(),
        farewell: None,
    };
    while !voyage.over() {
        let news = voyage.next().await;
        voyage.hear(news);
    }
    voyage.contacts.terminal.finish();
    Ok(Report { wall: begin.elapsed(), ..voyage.report })
}

impl Crew {
    fn start(
        &self,
        local: u32,
        terminal: &Arc<Terminal>,
        ended: mpsc::Sender<(u32, Ended)>,
    ) -> io::Result<Started> {
        let rank = self.common.place.first_rank + local;
        let local_rank = self.common.place.first_local_rank + local;
        let shown = self.output.filter.as_ref().is_none_or(|ranks| ranks.contains(&local_rank));
        let (redirects, tee) = (self.output.redirects.of(local_rank), self.output.tee.of(local_rank));
        let dir = self.output.log_dir.join(format!("rank{rank:04}"));
        let sink =
            |redirect, tee, name| Sink { route: Route::new(redirect, tee, shown), path: dir.join(name) };
        let output = Output {
            stdout: sink(redirects.stdout, tee.stdout, "stdout.log"),
            stderr: sink(redirects.stderr, tee.stderr, "stderr.log"),
            console: Arc::clone(terminal) as Arc<dyn Console>,
            prefix: format!("[rank{rank}] "),
        };
        let log = output.stderr.route.file.then(|| {
            let begin = std::fs::metadata(&output.stderr.path).map_or(0, |log| log.len());
            Log { path: output.stderr.path.clone(), begin }
        });
        let program = Program {
            path: self.program.clone(),
            args: self.args.clone(),
            env: self.common.variables(local),
        };
        let (keeper, end) = keeper::start(&program, Stdio::null(), &output)?;
        tokio::spawn(async move {
            // The launcher's receiver lives until all have ended.
            if let Ok(how) = end.await {
                let _ = ended.send((local, how)).await;
            }
        });
        Ok(Started { keeper, log })
    }
}

impl Voyage<'_> {
    /// All workers have ended, and so has a coordinator of ours.
    fn over(&self) -> bool {
        self.machine.all_ended() && self.contacts.coordinator.is_none()
    }

    async fn next(&mut self) -> News {
        let deadline = [self.machine.next_deadline(), self.farewell].into_iter().flatten().min();
        let tick = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        let coordinator = async {
            match &mut self.contacts.coordinator {
                Some((_, ends)) => ends.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some((worker, how)) = self.ends.recv() => News::Worker(worker, how),
            Some(how) = coordinator => News::Coordinator(how),
            Some(signal) = self.contacts.signals.recv() => News::Signal(signal),
            Some(event) = self.events.recv() => News::Watched(Box::new(event)),
            Some(why) = self.refusals.1.recv() => News::StopRefused(why),
            () = tick => News::Tick,
        }
    }

    fn hear(&mut self, news: News) {
        let event = match news {
            News::Worker(worker, how) => Event::WorkerEnded(worker, how),
            News::Coordinator(how) => self.coordinator_ended(how),
            News::Signal(signal) => {
                self.announce(signal);
                Event::Signal(signal)
            }
            News::Watched(event) => return self.show(*event),
            News::StopRefused(why) => {
                tracing::warn!(
                    why,
                    "the run cannot be asked to stop; the signal goes to the workers themselves"
                );
                Event::StopRefused
            }
            News::Tick => Event::Tick,
        };
        let now = Instant::now();
        for action in self.machine.handle(now, event) {
            self.act(action);
        }
        self.note_end(now);
    }

    fn announce(&self, signal: i32) {
        let name = signals::name(signal);
        match self.machine.interrupted() {
            None => self.contacts.terminal.line(&format!(
                "{name}: finishing the step in flight and writing a checkpoint; once more to end at once"
            )),
            Some(_) => self.contacts.terminal.line(&format!("{name} again: ending at once")),
        }
    }

    fn coordinator_ended(&mut self, how: Ended) -> Event {
        self.contacts.coordinator = None;
        self.report.coordinator = Some(how);
        Event::CoordinatorEnded { lost: !self.machine.all_ended() && host::died(how) }
    }

    fn show(&mut self, event: WatchEvent) {
        let terminal = &self.contacts.terminal;
        match event.kind {
            Some(Kind::Step(step)) => {
                terminal.progress(step.step + 1, step.total_steps, events::beside_bar(&step));
                self.report.last_step = Some(step);
            }
            Some(Kind::Failure(failure)) => {
                self.report.first_cause.get_or_insert(failure);
            }
            Some(Kind::Status(now)) => {
                if now.total_steps > 0 {
                    terminal.progress(now.committed_steps, now.total_steps, String::new());
                }
                if let Some(failure) = now.first_failure {
                    self.report.first_cause.get_or_insert(failure);
                }
            }
            _ => {}
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::AskStop(signal) => self.ask_stop(signal),
            Action::SignalAll(signal) => {
                for worker in self.machine.living() {
                    self.workers[&worker].keeper.signal(signal);
                }
            }
            Action::ReportExit(worker, how) => self.report_exit(worker, how),
        }
    }

    fn ask_stop(&self, signal: i32) {
        let (access, refused) = (self.contacts.access.clone(), self.refusals.0.clone());
        let reason = format!("{} at the launcher on {}", signals::name(signal), self.crew.host);
        tokio::spawn(async move {
            if let Err(status) = access.control().stop_run(prompt(StopRunRequest { reason })).await {
                let _ = refused.send(status.message().to_owned()).await;
            }
        });
    }

    fn report_exit(&self, worker: u32, how: Ended) {
        let access = self.contacts.access.clone();
        let ended = match how {
            Ended::Code(code) => report_exit_request::Ended::ExitCode(code),
            Ended::Signal(signal) => report_exit_request::Ended::Signal(signal),
        };
        let rank = self.crew.common.place.first_rank + worker;
        let request = ReportExitRequest { node_id: self.crew.node_id.clone(), rank, ended: Some(ended) };
        tokio::spawn(async move {
            if let Err(status) = access.coordinator().report_exit(prompt(request)).await {
                tracing::debug!(%status, "a worker's end could not be reported");
            }
        });
    }

    /// Keeps the report up to date, and sees to it that our coordinator does not outstay its run.
    fn note_end(&mut self, now: Instant) {
        self.report.interrupted = self.machine.interrupted();
        self.report.coordinator_lost = self.machine.coordinator_lost();
        let place = &self.crew.common.place;
        self.report.worker = self.machine.first_failure().map(|(worker, ended)| FailedWorker {
            rank: place.first_rank + worker,
            local_rank: place.first_local_rank + worker,
            host: self.crew.host.clone(),
            pid: self.workers[&worker].keeper.pid,
            ended,
            log: self.workers[&worker].log.clone(),
        });
        let Some((keeper, _)) = &self.contacts.coordinator else { return };
        if !self.machine.all_ended() {
            return;
        }
        let others_may_run =
            place.nnodes > 1 && self.report.worker.is_none() && self.report.interrupted.is_none();
        match self.farewell {
            None if others_may_run => {}
            None => self.farewell = Some(now + FAREWELL),
            Some(at) if now >= at => {
                keeper.signal(nix::libc::SIGKILL);
                self.farewell = Some(now + FAREWELL);
            }
            Some(_) => {}
        }
    }
}
