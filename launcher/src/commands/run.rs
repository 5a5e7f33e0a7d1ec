//! `cox run`: from a configuration to a trained adapter.

mod concluding;
mod coordinating;
mod keeping;

use std::{cell::RefCell, path::Path, sync::Arc};

use clap::Args;
use coxswain_coordinator::journal::{Fate, History};
use coxswain_identity::{
    Address, Whereabouts,
    claims::{Claim, Claims},
};
use coxswain_proto::{
    run_spec::RunSpec,
    v1::{Failure, JoinNodeRequest, RunSpecDocument},
};
use tokio::sync::mpsc;

use self::{concluding::LaunchConclusion, coordinating::CoordinatorSetup};
use super::{
    acceptance::{self, LaunchableRun, Outline},
    runtime::block_on,
    spec_args::SpecArgs,
};
use crate::{
    clock,
    control::Access,
    credentials::OfLaunch,
    exit::{CliError, Exit, Outcome},
    launch::{
        flags::LaunchFlags,
        inputs::process_env,
        machine::LocalMachine,
        plan::{Hosting, Plan, Sources},
        rendezvous::{self, Role},
        worker_env::{self, Common, Place},
    },
    notify::{HookSources, Notifier, NotifyFlags},
    relay::Relay,
    render,
    supervise::{
        child::this_program,
        console::{Console, LogWriter, Terminal},
        console_mode::{ConsoleFlags, Mode},
        group::WorkerGroup,
        host::{self, Host},
        machine::ProcessExit,
        report::Report,
        signals::{self, Signals},
        standby::{self, Standby},
        supervisor::{self, Contacts},
    },
    tasks::accelerator,
    telemetry::{LogFlags, LogFormat},
};

/// Flags of `cox run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    pub(super) spec: SpecArgs,
    #[command(flatten)]
    launch: LaunchFlags,
    /// Set an unreadable journal aside, and continue from the newest checkpoint with a new journal
    #[arg(long)]
    new_journal: bool,
    #[command(flatten)]
    console: ConsoleFlags,
    #[command(flatten)]
    notify: NotifyFlags,
}

/// One launch.
struct Launch<'a> {
    log: &'a LogFlags,
    notify: &'a NotifyFlags,
    spec: RunSpec,
    plan: Plan,
    machine: LocalMachine,
    credentials: OfLaunch,
    terminal: Arc<Terminal>,
}

/// Launches a run on this machine and stays with it to its end.
pub fn execute(args: &RunArgs, log: &LogFlags, writer: LogWriter) -> Outcome {
    let mut spec = args.spec.load()?;
    let machine = LocalMachine::this();
    let plan = Plan::resolve(&Sources {
        flags: &args.launch,
        env: &process_env,
        spec: &spec,
        machine: &machine,
        gpus: &|| accelerator().probe().map(|gpus| gpus.count),
    })?;
    let place = keeping::pin(&mut spec, &plan)?;
    let accepted = acceptance::accept(&spec, &plan, place.as_ref(), args.new_journal)?;
    accepted.warn();
    let LaunchableRun { outline, opening, .. } = accepted;
    let brought = place.map(|place| place.bring(&spec)).transpose()?.flatten().map(|of| of.to_string());
    if let Some(kept) = opening.map(|opening| opening.set_journal_aside()).transpose()?.flatten() {
        tracing::warn!("the damaged journal is set aside as {}", kept.display());
    }
    let output_dir = Path::new(&spec.run.output_dir);
    let credentials = OfLaunch::resolve(output_dir, &process_env, rendezvous::stays_here(&plan))?;
    let mode = match log.log_format {
        LogFormat::Text => Mode::of_stderr(&args.console),
        // For programs, wherever it goes.
        LogFormat::Json => Mode::choose(&args.console, false),
    };
    let terminal = Arc::new(Terminal::new(mode, writer));
    let told = outline.map(|outline| {
        let Outline { forecast, data, steps, .. } = &outline;
        render::plan::at_start(&forecast.question, &forecast.outlooks, data, steps)
    });
    for line in told.iter().flat_map(|told| told.lines()).chain(brought.as_deref()) {
        terminal.line(line);
    }
    let launch = Launch { log, notify: &args.notify, spec, plan, machine, credentials, terminal };
    // Children are killed when the thread that started them ends: this one.
    let outcome = block_on(launch.run());
    // Where the run never began.
    launch.terminal.finish();
    outcome
}

/// A launcher that has its place.
struct PlacedLauncher {
    place: Place,
    /// How it has asked for it.
    request: JoinNodeRequest,
    /// The coordinator, if it is ours.
    coordinator: Option<Host>,
    whereabouts: Whereabouts,
    access: Access,
    /// Role, if this launcher could take it.
    claims: Option<Claims>,
}

impl Launch<'_> {
    async fn run(&self) -> Outcome {
        let log_dir = &self.plan.output.log_dir;
        let unusable = |error| CliError::usage(format!("{}: cannot write logs: {error}", log_dir.display()));
        std::fs::create_dir_all(log_dir).map_err(unusable)?;
        let mut signals = signals::catch().map_err(|error| CliError::new(Exit::Internal, error))?;
        let (lost, superseded) = mpsc::channel(1);
        let node_id = node_id();
        let coordinating = self.coordinating(&node_id, lost);
        let PlacedLauncher { place, request, coordinator, whereabouts, access, claims } =
            self.meet(&coordinating, &node_id, &mut signals).await?;
        self.announce(&place, &access, coordinator.is_some());
        let take_over = |last: &Claim| coordinating.take_over(last);
        let number = place.claim;
        let standby = claims.map(|claims| Standby { claims, number, take_over: &take_over, told: None });
        let relay = self.relay(&access).await?;
        let group = self.group(place, whereabouts, request, relay.as_deref());
        // One word for a run: that of the launcher with its coordinator.
        let notifier = coordinator.is_some().then(|| self.notifier(&access)).flatten();
        let terminal = Arc::clone(&self.terminal);
        let contacts =
            Contacts { access: access.clone(), relay, coordinator, standby, superseded, signals, terminal };
        let report = supervisor::run(&group, contacts)
            .await
            .map_err(|error| CliError::new(Exit::Internal, format!("cannot start the workers: {error}")))?;
        if !coordinating.is_here() {
            return self.conclude(&report, None).await;
        }
        self.end(&coordinating, report, notifier, &access).await
    }

    /// What the launcher with the coordinator leaves, keeps and says at the end. That a run has ended well
    /// others hear when its end is where it is to be kept, and else at once.
    async fn end(
        &self,
        coordinating: &CoordinatorSetup<'_>,
        mut report: Report,
        notifier: Option<Notifier>,
        access: &Access,
    ) -> Outcome {
        let history = coordinating.history();
        if report.first_cause.as_ref().is_none_or(|cause| !cause.fatal) {
            report.first_cause = history.as_ref().and_then(recorded_end).or(report.first_cause);
        }
        let stopped = history.is_some_and(|history| history.fate == Fate::Stopped);
        let success = report.success_text(stopped);
        let ended = self.conclude(&report, Some(success.clone())).await;
        // A launcher that has taken the coordinator over speaks of the end alone.
        let notifier = notifier.or_else(|| self.notifier(access));
        let first = report.signalled.map(|(_, first)| first);
        let tell = async |exit: Exit, state: &str, text: &str| {
            if let Some(notifier) = notifier {
                tokio::select! {
                    () = notifier.end(state, exit.code(), text) => {}
                    // From now on: one that came before was for what it met.
                    () = signals::insistence(first) => {}
                }
            }
        };
        if let Err(failed) = &ended {
            let state = if matches!(failed.exit, Exit::Signal(_)) { "interrupted" } else { "failed" };
            tell(failed.exit, state, &report.failure_text(&self.spec.run.name)).await;
            // How it went is said; the run's own end counts.
            let _ = self.keep(coordinating, &report).await;
            return ended;
        }
        let kept = self.keep(coordinating, &report).await;
        match &kept {
            Ok(()) => tell(Exit::Done, if stopped { "stopped" } else { "finished" }, &success).await,
            Err(failed) => {
                let text = format!("{success}, but its last checkpoint could not be uploaded");
                tell(failed.exit, "failed", &text).await;
            }
        }
        kept
    }

    /// Waits until the end of the run is in its bucket, if it has one.
    async fn keep(&self, coordinating: &CoordinatorSetup<'_>, report: &Report) -> Outcome {
        let Some(uploader) = coordinating.uploader().filter(|_| !report.displaced) else { return Ok(()) };
        let kept = keeping::KeptEnd {
            spec: &self.spec,
            terminal: &self.terminal,
            patience: self.plan.shutdown_timeout,
            signalled: report.signalled,
        };
        kept.keep(&uploader).await
    }

    async fn conclude(&self, report: &Report, success: Option<String>) -> Outcome {
        LaunchConclusion { spec: &self.spec, terminal: &self.terminal }.conclude(report, success).await
    }

    fn coordinating(&self, node_id: &str, superseded: mpsc::Sender<String>) -> CoordinatorSetup<'_> {
        CoordinatorSetup {
            spec: &self.spec,
            plan: &self.plan,
            log: self.log,
            machine: &self.machine,
            credentials: &self.credentials,
            terminal: &self.terminal,
            node_id: node_id.to_owned(),
            superseded,
            signs: RefCell::default(),
            replaced: RefCell::default(),
        }
    }

    /// Starts the coordinator, or finds it, and is given a place.
    async fn meet(
        &self,
        coordinating: &CoordinatorSetup<'_>,
        node_id: &str,
        signals: &mut Signals,
    ) -> Result<PlacedLauncher, CliError> {
        let claims = Claims::of_run(Path::new(&self.spec.run.output_dir));
        let alone = self.plan.nnodes.max == 1;
        // A launcher that is to start the coordinator may come back to a run that goes on without its
        // machine; any other calls where it was told to, as long as somebody answers there.
        let own = self.plan.hosting == Hosting::Yes;
        let lost = !alone && (own || !standby::answers(&self.plan.endpoint.to_string()).await);
        let living = if lost { standby::living(&claims).await } else { None };
        let role = match &living {
            // The run goes on without the machine that is called the coordinator's.
            Some(_) => Role::Guest,
            None => rendezvous::take_role(&self.plan)?,
        };
        let (port, mut coordinator) = match role {
            Role::Host(listener) => {
                let port =
                    listener.local_addr().map_err(|error| CliError::new(Exit::Internal, error))?.port();
                (port, Some(coordinating.begin(listener, port)?))
            }
            Role::Guest => (self.plan.endpoint.port, None),
        };
        let first = match living {
            Some(claim) => Address::of_claim(&claim, self.plan.speech.plaintext),
            None => rendezvous::first_address(&self.plan, coordinator.is_some(), port),
        };
        let newest = claims.newest().filter(|_| coordinator.is_none() && !alone);
        let whereabouts = match newest {
            None => Whereabouts::fixed(first),
            Some(claim) => Whereabouts::until_moved(first, claims.clone(), claim.number),
        };
        let credentials = &self.credentials.credentials;
        let access = Access::to(&whereabouts, credentials)?;
        let asked_for = coordinator.is_none().then(|| RunSpecDocument::from(&self.spec));
        let request = rendezvous::request(&self.plan, &self.machine.host, node_id.to_owned());
        let request = JoinNodeRequest { spec: asked_for, ..request };
        let joined = rendezvous::join(&access, &self.plan, &request);
        let place = tokio::select! {
            place = joined => place?,
            signal = signals.next() => return Err(CliError::silent(Exit::Signal(signal))),
            how = ended(&mut coordinator) => {
                return Err(coordinator_ended_early(how, &self.plan.output.log_dir));
            }
        };
        // From now on this place and no other.
        let request = JoinNodeRequest { node_rank: Some(place.node_rank), returns: true, ..request };
        if coordinator.is_some() || claims.newest_from(place.claim).is_none() {
            return Ok(PlacedLauncher { place, request, coordinator, whereabouts, access, claims: None });
        }
        let whereabouts = Whereabouts::until_moved(whereabouts.now(), claims.clone(), place.claim);
        let access = Access::to(&whereabouts, credentials)?;
        Ok(PlacedLauncher { place, request, coordinator, whereabouts, access, claims: Some(claims) })
    }

    fn notifier(&self, access: &Access) -> Option<Notifier> {
        let sources = HookSources { flags: self.notify, env: &process_env, spec: &self.spec };
        Notifier::start(sources, access, &self.terminal)
    }

    fn logs(&self) -> String {
        self.plan.output.log_dir.display().to_string()
    }

    /// Where workers call, if this launcher is to speak for them.
    async fn relay(&self, access: &Access) -> Result<Option<Arc<Relay>>, CliError> {
        if !self.plan.speech.one_stream {
            return Ok(None);
        }
        let relay = Relay::start(access.clone(), &self.credentials.credentials).await;
        let failed = |error| CliError::internal(format!("cannot listen to workers on 127.0.0.1: {error}"));
        relay.map(Some).map_err(failed)
    }

    fn group(
        &self,
        place: Place,
        whereabouts: Whereabouts,
        join: JoinNodeRequest,
        relay: Option<&Relay>,
    ) -> WorkerGroup {
        let port = whereabouts.first().port().unwrap_or(self.plan.endpoint.port);
        let threads = worker_env::threads(
            &process_env,
            self.spec.launch.threads_per_worker,
            self.machine.cores,
            place.local_world_size,
        );
        let common = Common {
            place,
            master_addr: self.plan.endpoint.host.clone(),
            master_port: port,
            coordinator: relay.map_or(whereabouts, |relay| Whereabouts::fixed(relay.address().clone())),
            credentials: self.credentials.variables(),
            local_addr: rendezvous::local_addr(&self.plan, &self.machine, port),
            device: self.plan.device,
            threads,
            purge_delay: worker_env::purge_delay(&process_env),
            max_restarts: self.plan.budgets.restarts,
        };
        let mut args = vec!["worker".to_owned()];
        args.extend(self.log.as_args());
        WorkerGroup {
            common,
            program: this_program().unwrap_or_else(|_| Path::new("cox").to_owned()),
            args,
            output: self.plan.output.clone(),
            stop_patience: self.plan.shutdown_timeout,
            host: self.machine.host.clone(),
            join,
        }
    }

    fn announce(&self, place: &Place, access: &Access, hosting: bool) {
        let last = place.first_rank + place.nproc - 1;
        let ranks = if place.nproc == 1 {
            format!("rank {last}")
        } else {
            format!("ranks {}-{last}", place.first_rank)
        };
        let role = if hosting { "coordinator here" } else { "coordinator" };
        self.terminal.line(&format!(
            "cox {}: {} · {ranks} of {} · {role} at {} · logs in {}",
            coxswain_proto::VERSION,
            self.spec.run.name,
            place.world_size,
            access.address(),
            self.logs(),
        ));
    }
}

/// What it means that our coordinator has ended before this launcher had its place.
fn coordinator_ended_early(how: ProcessExit, log_dir: &Path) -> CliError {
    match how {
        // It has said why.
        ProcessExit::Code(code) if code != 0 && !host::died(how) => CliError::silent(Exit::of_child(code)),
        how => CliError::new(
            Exit::CoordinatorLost,
            format!(
                "the coordinator ended before the run began ({how}); see {}/coordinator.log",
                log_dir.display()
            ),
        ),
    }
}

/// The failure that ended the run.
fn recorded_end(history: &History) -> Option<Failure> {
    history.failures.last().filter(|failure| failure.fatal).map(Failure::from)
}

/// Waits for the end of a coordinator of ours; for ever if there is none.
async fn ended(coordinator: &mut Option<Host>) -> ProcessExit {
    match coordinator {
        Some(host) => host.ended().await,
        None => std::future::pending().await,
    }
}

/// Unique among launchers that are alive at the same time, and stable over one launcher's retries.
fn node_id() -> String {
    let since_epoch = clock::since_epoch();
    format!("{}-{}-{}", LocalMachine::this().host, std::process::id(), since_epoch.as_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coordinator_that_died_before_the_run_began_is_lost_and_one_that_refused_has_reported_why() {
        let of = |how| coordinator_ended_early(how, Path::new("runs/a/logs"));
        for died in [ProcessExit::Code(1), ProcessExit::Code(101), ProcessExit::Signal(9)] {
            let failed = of(died);
            assert_eq!(failed.exit, Exit::CoordinatorLost);
            assert!(failed.message.is_some_and(|text| text.ends_with("see runs/a/logs/coordinator.log")));
        }
        let refused = of(ProcessExit::Code(3));
        assert_eq!((refused.exit, refused.message), (Exit::BadInput, None));
    }
}
