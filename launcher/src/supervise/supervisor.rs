//! The launcher at work: starts the processes, feeds the machine, does what it decides, and waits for
//! everything to end.

use std::{
    collections::BTreeMap,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use coxswain_identity::claims::Claim;
use coxswain_proto::v1::{RunPhase, WatchEvent, watch_event::Kind};
use coxswain_worker::feeder::note;
use tokio::sync::mpsc;

use super::{
    console::{Console, Terminal},
    exits::{Exits, WorkerExit},
    group::{Attempt, WorkerGroup, WorkerProcess},
    host::{self, Host},
    machine::{Action, Event, KillReason, Machine, ProcessExit},
    orders::{self, LineTo, Order},
    report::{FailedWorker, Report},
    signal_policy::{self, ShutdownRequest, SignalGrant},
    signals::{self, Signals},
    standby::{self, Standby},
    watcher,
};
use crate::{clock, control::Access, exit::Exit, relay::Relay, threads};

/// News waiting for the launcher: watch events are the most frequent, a few for each step.
const NEWS: usize = 256;
/// How long after this machine's workers the coordinator is taken to be needed by others.
const HOSTS_ONLY: Duration = Duration::from_secs(1);
/// How long the coordinator may take to end after this machine's workers have, once the run has gone wrong or
/// is alone here.
const FAREWELL: Duration = coxswain_proto::limits::FAREWELL_TIMEOUT.saturating_add(Duration::from_secs(5));

/// What the launcher is in touch with while its workers run.
pub struct Contacts<'a> {
    /// The coordinator.
    pub access: Access,
    /// Where this launcher speaks for its workers, if it does.
    pub relay: Option<Arc<Relay>>,
    /// Process, if it is ours.
    pub coordinator: Option<Host>,
    /// How it would become ours, if it can.
    pub standby: Option<Standby<'a>>,
    /// Says why our coordinator is one too many: another launcher has its role, or the run.
    pub superseded: mpsc::Receiver<String>,
    /// Signals to the launcher.
    pub signals: Signals,
    /// The user.
    pub terminal: Arc<Terminal>,
}

/// One thing the launcher hears.
enum News {
    Worker(u32, ProcessExit),
    Coordinator(ProcessExit),
    Vacant(Claim),
    Superseded(String),
    Ordered(Order),
    Signal(i32),
    Watched(Box<WatchEvent>),
    StopRefused(String),
    Tick,
}

/// Everything in motion.
struct Supervisor<'a> {
    group: &'a WorkerGroup,
    contacts: Contacts<'a>,
    machine: Machine,
    workers: BTreeMap<u32, WorkerProcess>,
    ended: mpsc::Sender<(u32, ProcessExit)>,
    ends: mpsc::Receiver<(u32, ProcessExit)>,
    exits: Exits,
    events: mpsc::Receiver<WatchEvent>,
    orders: mpsc::Receiver<Order>,
    vacancies: mpsc::Receiver<Claim>,
    refusals: (mpsc::Sender<String>, mpsc::Receiver<String>),
    report: Report,
    /// When a coordinator that does not end is ended.
    farewell: Option<Instant>,
    /// When to say that only the coordinator is left here: at the end of a run that is so for a moment.
    hosts_from: Option<Instant>,
    hosts_told: bool,
}

/// Starts the workers and returns when they, and a coordinator of ours, have ended.
pub async fn run(group: &WorkerGroup, contacts: Contacts<'_>) -> io::Result<Report> {
    let begin = clock::now();
    let place = &group.common.place;
    let (watched, events) = mpsc::channel(NEWS);
    let _watcher = watcher::follow(contacts.access.clone(), watched, Duration::MAX);
    let (ordered, orders) = mpsc::channel(NEWS);
    let line = LineTo { access: contacts.access.clone(), relay: contacts.relay.clone() };
    let _orders = orders::follow(line, group.join.clone(), place.first_rank, ordered);
    let (vacant, vacancies) = mpsc::channel(1);
    let _looking = contacts.standby.as_ref().map(|standby| standby::look(standby, vacant));
    let (ended, ends) = mpsc::channel(NEWS);
    let mut workers = BTreeMap::new();
    for local in 0..place.nproc {
        workers.insert(local, group.start(local, Attempt::first(), &contacts.terminal, ended.clone())?);
    }
    let mut supervisor = Supervisor {
        group,
        machine: Machine::new(place.nproc, group.stop_patience),
        exits: Exits::new(contacts.access.clone(), group.join.node_id.clone(), begin),
        contacts,
        workers,
        ended,
        ends,
        events,
        orders,
        vacancies,
        refusals: mpsc::channel(4),
        report: Report::default(),
        farewell: None,
        hosts_from: None,
        hosts_told: false,
    };
    while !supervisor.over() {
        let news = supervisor.next().await;
        supervisor.hear(news);
    }
    // What the coordinator said last may still be waiting here.
    while let Ok(event) = supervisor.events.try_recv() {
        supervisor.show(event);
    }
    supervisor.contacts.terminal.finish();
    Ok(Report { wall: begin.elapsed(), ..supervisor.report })
}

impl Supervisor<'_> {
    /// All workers have ended, and so has a coordinator of ours.
    fn over(&self) -> bool {
        self.machine.finished() && self.contacts.coordinator.is_none()
    }

    async fn next(&mut self) -> News {
        let hosts_from = self.hosts_from.filter(|_| !self.hosts_told);
        let deadline = [self.machine.next_deadline(), self.farewell, hosts_from].into_iter().flatten().min();
        let tick = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        let coordinator = async {
            match &mut self.contacts.coordinator {
                Some(host) => host.ended().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some((worker, how)) = self.ends.recv() => News::Worker(worker, how),
            how = coordinator => News::Coordinator(how),
            Some(claim) = self.vacancies.recv() => News::Vacant(claim),
            Some(why) = self.contacts.superseded.recv() => News::Superseded(why),
            Some(order) = self.orders.recv() => News::Ordered(order),
            signal = self.contacts.signals.next() => News::Signal(signal),
            Some(event) = self.events.recv() => News::Watched(Box::new(event)),
            Some(why) = self.refusals.1.recv() => News::StopRefused(why),
            () = tick => News::Tick,
        }
    }

    fn hear(&mut self, news: News) {
        self.exits.look(clock::now());
        let event = match news {
            News::Worker(worker, how) => Some(Event::WorkerEnded(worker, how)),
            News::Coordinator(how) => Some(self.coordinator_ended(how)),
            News::Vacant(claim) => {
                self.take_over(&claim);
                None
            }
            News::Superseded(why) => Some(self.superseded(&why)),
            News::Ordered(order) => self.ordered(order),
            News::Signal(signal) => {
                self.announce(signal);
                self.report.signalled.get_or_insert_with(|| (clock::now(), signal));
                Some(Event::Signal(signal))
            }
            News::Watched(event) => self.show(*event),
            News::StopRefused(why) => {
                tracing::warn!(
                    why,
                    "the coordinator does not answer; the workers are killed without a checkpoint"
                );
                Some(Event::StopRefused)
            }
            News::Tick => Some(Event::Tick),
        };
        let now = clock::now();
        let actions = event.map(|event| self.machine.handle(now, event)).unwrap_or_default();
        for action in actions {
            self.act(action);
        }
        self.note_end(now);
    }

    fn announce(&self, signal: i32) {
        let name = signals::name(signal);
        match self.machine.interrupted() {
            None => {
                let again = if signals::insists(signal) { "send it again" } else { "send SIGINT" };
                self.contacts.terminal.line(&format!(
                    "{name}: finishing the current step and writing a checkpoint; {again} to exit immediately"
                ));
            }
            Some(first) if signals::insists_after(first, signal) => {
                self.contacts.terminal.line(&format!("{name}, second signal: exiting immediately"));
            }
            Some(_) => {}
        }
    }

    /// The machine of the coordinator is gone: another one is started here.
    fn take_over(&mut self, claim: &Claim) {
        let wanted = self.machine.goes_on() && self.contacts.coordinator.is_none();
        let Some(standby) = self.contacts.standby.as_mut().filter(|_| wanted) else { return };
        let told = match (standby.take_over)(claim) {
            Ok(None) => return,
            Ok(Some(host)) => {
                self.contacts.coordinator = Some(host);
                format!(
                    "the coordinator's machine is lost (it was at {}): this launcher starts a new coordinator",
                    claim.address
                )
            }
            Err(why) => {
                let why = why.message.unwrap_or_default();
                format!("the coordinator's machine is lost, and this launcher cannot take over yet: {why}")
            }
        };
        // Tried again with every look.
        if standby.told.replace(told.clone()).as_ref() != Some(&told) {
            self.contacts.terminal.line(&told);
        }
    }

    /// Our coordinator is one too many.
    fn superseded(&mut self, why: &str) -> Event {
        if let Some(host) = &mut self.contacts.coordinator {
            host.dismiss();
        }
        if !std::mem::replace(&mut self.report.displaced, true) {
            self.contacts.terminal.line(why);
        }
        Event::CoordinatorLost
    }

    fn coordinator_ended(&mut self, how: ProcessExit) -> Event {
        self.contacts.coordinator = None;
        self.report.coordinator = Some(how);
        match host::died(how) && !self.machine.finished() {
            true => Event::CoordinatorLost,
            false => Event::CoordinatorEnded,
        }
    }

    fn ordered(&mut self, order: Order) -> Option<Event> {
        match order {
            Order::Respawn(order) => {
                let worker = order.rank.checked_sub(self.group.common.place.first_rank)?;
                tracing::debug!(rank = order.rank, attempt = order.attempt, reason = order.reason, "respawn");
                Some(Event::Respawn { worker, attempt: order.attempt })
            }
            // A coordinator of ours is watched as a process.
            Order::Unreachable if self.contacts.coordinator.is_some() => None,
            Order::Unreachable => Some(Event::CoordinatorLost),
            Order::Displaced(why) => {
                self.contacts.terminal.line(&why);
                self.report.displaced = true;
                Some(Event::CoordinatorLost)
            }
        }
    }

    /// Shows an event; the run's end is the machine's business, too.
    fn show(&mut self, event: WatchEvent) -> Option<Event> {
        self.contacts.terminal.watched(&event);
        let phase = match event.kind? {
            Kind::Step(step) => {
                if step.skipped.is_none() {
                    self.report.last_learned = Some(step.clone());
                }
                self.report.last_step = Some(step);
                return None;
            }
            Kind::Failure(failure) => {
                // The one that ended the run, if one did; else the newest.
                if failure.fatal || self.report.first_cause.as_ref().is_none_or(|known| !known.fatal) {
                    self.report.first_cause = Some(failure);
                }
                return None;
            }
            Kind::Checkpoint(checkpoint) => {
                self.report.note_checkpoints(&[checkpoint]);
                return None;
            }
            Kind::Status(now) => {
                self.report.note_checkpoints(&now.checkpoints);
                self.report.first_cause = self.report.first_cause.take().or(now.first_failure);
                now.phase
            }
            Kind::Phase(changed) => changed.phase,
            _ => return None,
        };
        let phase = RunPhase::try_from(phase).ok()?;
        matches!(phase, RunPhase::Finished | RunPhase::Failed).then(|| {
            self.report.run_end = Some(phase);
            Event::RunOver
        })
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::AskStop(signal) => self.ask_stop(signal),
            Action::KillAll(why) => {
                self.announce_end(why);
                // A person who insists does not wait for what the coordinator makes of it; other nodes may.
                let host = self.contacts.coordinator.as_mut().filter(|_| self.group.common.place.nnodes == 1);
                if let Some(host) = host.filter(|_| matches!(why, KillReason::Insisted)) {
                    host.dismiss();
                }
                for worker in self.machine.living() {
                    self.workers[&worker].process.kill();
                }
            }
            Action::Kill(worker) => self.workers[&worker].process.kill(),
            Action::Start(worker, attempt) => self.restart(worker, attempt),
            Action::ReportExit(worker, how) => {
                let WorkerProcess { process, note, .. } = &self.workers[&worker];
                let read =
                    note.as_ref().filter(|_| matches!(how, ProcessExit::Signal(_))).and_then(note::killing);
                self.exits.report(self.rank(worker), WorkerExit { pid: process.pid, how, read });
            }
        }
    }

    /// Says that workers are ended that were not asked to end at once.
    fn announce_end(&self, why: KillReason) {
        let ranks: Vec<_> = self.machine.living().map(|worker| self.rank(worker).to_string()).collect();
        let (what, list) = match ranks.as_slice() {
            [] => return,
            [one] => ("rank", format!("{one} is")),
            many => ("ranks", format!("{} are", many.join(", "))),
        };
        match why {
            KillReason::StopTookTooLong => self.contacts.terminal.line(&format!(
                "{what} {list} still there after {} s (--shutdown-timeout): killed without a checkpoint of this step",
                self.group.stop_patience.as_secs_f64()
            )),
            KillReason::RunOver => tracing::debug!("{what} {list} still running after the end of the run: killed"),
            // Said already.
            KillReason::Insisted | KillReason::StopRefused | KillReason::CoordinatorLost => {}
        }
    }

    fn rank(&self, worker: u32) -> u32 {
        self.group.common.place.first_rank + worker
    }

    fn restart(&mut self, worker: u32, attempt: u32) {
        let rank = self.rank(worker);
        let after_memory_kill = self.exits.forget(rank);
        let attempt = Attempt { number: attempt, after_memory_kill };
        match self.group.start(worker, attempt, &self.contacts.terminal, self.ended.clone()) {
            Ok(started) => drop(self.workers.insert(worker, started)),
            Err(error) => {
                let told = format!("rank {rank} cannot be started again: {error}");
                let why = threads::explain(&told).map(|why| format!("; {why}")).unwrap_or_default();
                self.contacts.terminal.line(&format!("{told}{why}"));
                // Told as an end, so that the coordinator decides about it as about any other; there is no
                // process to name.
                let how = ProcessExit::Code(Exit::Internal.code().into());
                self.exits.report(rank, WorkerExit { pid: 0, how, read: None });
                let ended = self.ended.clone();
                tokio::spawn(async move { ended.send((worker, how)).await });
            }
        }
    }

    fn ask_stop(&self, signal: i32) {
        let (access, refused) = (self.contacts.access.clone(), self.refusals.0.clone());
        let terminal = Arc::clone(&self.contacts.terminal);
        let reason = format!("{} at the launcher on {}", signals::name(signal), self.group.host);
        let alone = signals::announces_end(signal) && self.contacts.coordinator.is_none();
        let request = ShutdownRequest { reason, node_id: alone.then(|| self.group.join.node_id.clone()) };
        tokio::spawn(async move {
            match signal_policy::ask(&access, &request).await {
                Ok(SignalGrant::Drained) => {
                    terminal.line("this node leaves the run; the others keep training")
                }
                Ok(SignalGrant::Stopping) => {}
                // A launcher that no longer listens has ended.
                Err(why) => drop(refused.send(why).await),
            }
        });
    }

    /// Keeps the report up to date, and sees to it that our coordinator does not outstay its run.
    fn note_end(&mut self, now: Instant) {
        self.report.interrupted = self.machine.interrupted();
        self.report.coordinator_lost = self.machine.coordinator_lost();
        let place = &self.group.common.place;
        self.report.worker = self.machine.first_failure().map(|(worker, ended)| FailedWorker {
            rank: place.first_rank + worker,
            local_rank: place.first_local_rank + worker,
            host: self.group.host.clone(),
            pid: self.workers[&worker].process.pid,
            ended,
            log: self.workers[&worker].log.clone(),
        });
        if !self.machine.finished() {
            return;
        }
        let Some(host) = &mut self.contacts.coordinator else { return };
        let others_may_run =
            place.nnodes > 1 && self.report.worker.is_none() && self.report.interrupted.is_none();
        match self.farewell {
            None if others_may_run => {
                let from = *self.hosts_from.get_or_insert(now + HOSTS_ONLY);
                if now >= from && !std::mem::replace(&mut self.hosts_told, true) {
                    let line =
                        "this node's workers have left; its launcher stays, because it hosts the coordinator";
                    self.contacts.terminal.line(line);
                }
            }
            // Others have as long as ours would have had.
            None if self.report.interrupted.is_some()
                && place.nnodes > 1
                && self.report.run_end.is_none() =>
            {
                self.farewell = Some(now + FAREWELL.max(self.group.stop_patience));
            }
            None => self.farewell = Some(now + FAREWELL),
            Some(at) if now >= at => {
                host.dismiss();
                self.farewell = Some(now + FAREWELL);
            }
            Some(_) => {}
        }
    }
}
