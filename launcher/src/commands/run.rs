//! `cox run`: from a configuration to a trained adapter.

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    sync::Arc,
};

use clap::Args;
use coxswain_coordinator::journal::{self, Fate};
use coxswain_identity::{Address, Door};
use coxswain_proto::{
    run_spec::RunSpec,
    v1::{Failure, JoinNodeRequest, RunSpecDocument},
};

use super::{ending, runtime::block_on, same_inputs, spec_args::SpecArgs};
use crate::{
    clock,
    control::Access,
    credentials::OfLaunch,
    endpoint::{self, Published},
    exit::{Exit, Failed, Outcome},
    launch::{
        flags::LaunchFlags,
        inputs::process_env,
        machine::LocalMachine,
        plan::{Plan, Sources},
        rendezvous::{self, Role},
        worker_env::{self, Common, Place},
    },
    notify::{Notifier, NotifyFlags},
    plan::check::{Forecast, refuse_float16_on_cpu},
    render::{self, summary},
    supervise::{
        child::Program,
        console::{Console, LogWriter, Terminal},
        console_mode::{ConsoleFlags, Mode},
        failure_file,
        group::WorkerGroup,
        host::{self, Host, HostConfig},
        machine::Ended,
        report::Report,
        signals,
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
    let spec = args.spec.load_to_launch()?;
    same_inputs::check(&spec)?;
    let machine = LocalMachine::this();
    let plan = Plan::resolve(&Sources {
        flags: &args.launch,
        env: &process_env,
        spec: &spec,
        machine: &machine,
        gpus: &|| accelerator().probe().map(|gpus| gpus.count),
    })?;
    let forecast = forecast(&spec, &plan)?;
    let output_dir = Path::new(&spec.run.output_dir);
    let credentials = OfLaunch::of(output_dir, &process_env, rendezvous::stays_here(&plan))?;
    credentials.tidy(output_dir, &process_env);
    let mode = match log.log_format {
        LogFormat::Text => Mode::of_stderr(&args.console),
        // For programs, wherever it goes.
        LogFormat::Json => Mode::of(&args.console, false),
    };
    let terminal = Arc::new(Terminal::new(mode, writer));
    let told = forecast.map(|forecast| render::plan::at_start(&forecast.question, &forecast.outlooks));
    for line in told.iter().flat_map(|told| told.lines()) {
        terminal.line(line);
    }
    let launch = Launch { log, notify: &args.notify, spec, plan, machine, credentials, terminal };
    // Children are killed when the thread that started them ends: this one.
    let outcome = block_on(launch.run());
    // Where the run never began.
    launch.terminal.finish();
    outcome
}

/// What the run will take of this machine's memory; nothing where its model or data cannot be read, which
/// the coordinator refuses and writes down. A run that no micro-batch makes fit ends here, before anything
/// starts; one that is too large as it is gets a warning.
fn forecast(spec: &RunSpec, plan: &Plan) -> Result<Option<Forecast>, Failed> {
    refuse_float16_on_cpu(spec, plan.device)?;
    let local = u64::from(plan.nproc_per_node);
    let Ok(forecast) = Forecast::of(spec, plan.device, u64::from(plan.nnodes.min) * local, local) else {
        return Ok(None);
    };
    match &forecast.shortfall {
        Some(shortfall) if shortfall.is_certain() => return Err(shortfall.refusal()),
        Some(shortfall) => tracing::warn!("{shortfall}; a step that runs out of memory lowers it"),
        None => {}
    }
    Ok(Some(forecast))
}

/// A coordinator of ours.
struct Hosted {
    host: Host,
    published: Published,
}

impl Launch<'_> {
    async fn run(&self) -> Outcome {
        let log_dir = &self.plan.output.log_dir;
        let unusable = |error| Failed::usage(format!("{}: cannot write logs: {error}", log_dir.display()));
        std::fs::create_dir_all(log_dir).map_err(unusable)?;
        let mut signals = signals::catch().map_err(|error| Failed::new(Exit::Internal, error))?;
        let node_id = node_id();
        let (port, mut hosted) = match rendezvous::take_role(&self.plan)? {
            Role::Host(listener) => {
                let port = listener.local_addr().map_err(|error| Failed::new(Exit::Internal, error))?.port();
                self.refuse_without_tls(&listener)?;
                (port, Some(self.start_coordinator(listener, port, &node_id)?))
            }
            Role::Guest => (self.plan.endpoint.port, None),
        };
        let access = Access::new(&self.coordinator(port).to_string(), &self.credentials.credentials)?;
        let request = rendezvous::request(&self.plan, &self.machine.host, node_id);
        let joined = rendezvous::join(&access, &self.plan, &request);
        let place = tokio::select! {
            place = joined => place?,
            signal = signals.next() => return Err(Failed::silent(Exit::Signal(signal))),
            how = ended(&mut hosted) => return Err(coordinator_ended_early(how, log_dir)),
        };
        self.announce(&place, &access, hosted.is_some());
        let hosting = hosted.is_some();
        // From now on this place and no other.
        let request = JoinNodeRequest { node_rank: Some(place.node_rank), returns: true, ..request };
        let group = self.group(place, port, request);
        let (coordinator, _published) = hosted.map(|Hosted { host, published }| (host, published)).unzip();
        let about = [self.spec.run.name.as_str(), &self.spec.run.output_dir];
        let hook = || {
            let env = process_env("COX_NOTIFY");
            Notifier::start(self.notify, env, access.clone(), about, &self.terminal)
        };
        // One word for a run: that of the launcher with its coordinator.
        let notifier = hosting.then(hook).flatten();
        let contacts = Contacts { access, coordinator, signals, terminal: Arc::clone(&self.terminal) };
        let mut report = supervisor::run(&group, contacts)
            .await
            .map_err(|error| Failed::new(Exit::Internal, format!("cannot start the workers: {error}")))?;
        if hosting && report.first_cause.as_ref().is_none_or(|cause| !cause.fatal) {
            report.first_cause = self.recorded_end().or(report.first_cause);
        }
        if let Some(notifier) = notifier {
            let exit = report.exit();
            let (state, text) = match exit {
                Exit::Done if self.is_stopped() => ("stopped", report.success_text(true)),
                Exit::Done => ("finished", report.success_text(false)),
                Exit::Signal(_) => ("interrupted", report.failure_text(&self.spec.run.name)),
                _ => ("failed", report.failure_text(&self.spec.run.name)),
            };
            notifier.end(state, exit.code(), &text).await;
        }
        self.conclude(&report, hosting).await
    }

    /// Where the coordinator is called.
    fn coordinator(&self, port: u16) -> Address {
        Address::parse(&format!("{}:{port}", self.plan.endpoint.host)).plaintext(self.plan.plaintext)
    }

    /// What the coordinator would refuse, before it is started.
    fn refuse_without_tls(&self, listener: &TcpListener) -> Outcome {
        let address = listener.local_addr().map_err(|error| Failed::new(Exit::Internal, error))?;
        let door = Door::new(&self.credentials.credentials, self.plan.plaintext)?;
        door.check(address).map_err(|problem| {
            Failed::usage(format!("{}: it can be reached from other machines: {problem}", self.plan.endpoint))
        })
    }

    fn start_coordinator(&self, listener: TcpListener, port: u16, node_id: &str) -> Result<Hosted, Failed> {
        let log_dir = &self.plan.output.log_dir;
        let output_dir = Path::new(&self.spec.run.output_dir);
        let published = Published::write(output_dir, &self.coordinator(port).to_string())?;
        failure_file::remove(output_dir);
        let spec = self.keep_spec()?;
        let (args, env) = (self.coordinator_args(&spec, node_id), self.credentials.variables());
        let program = Program { path: this_program()?, args, env };
        let console = Arc::clone(&self.terminal) as Arc<dyn Console>;
        let host = Host::start(HostConfig { program, listener, log_dir: log_dir.clone(), console })
            .map_err(|error| Failed::new(Exit::Internal, format!("cannot start the coordinator: {error}")))?;
        Ok(Hosted { host, published })
    }

    /// Writes down the run as it was launched. Every coordinator of this launch reads that: the user's file
    /// may be edited meanwhile.
    fn keep_spec(&self) -> Result<PathBuf, Failed> {
        let path = self.plan.output.log_dir.join(endpoint::SPEC_FILE);
        let document = RunSpecDocument::from(&self.spec);
        std::fs::write(&path, document.json)
            .map_err(|error| Failed::usage(format!("{}: {error}", path.display())))?;
        Ok(path)
    }

    fn coordinator_args(&self, spec: &Path, node_id: &str) -> Vec<String> {
        let plan = &self.plan;
        let mut args = vec!["coordinator".to_owned(), spec.display().to_string()];
        args.extend(self.log.as_args());
        args.extend([
            "--listen-stdin".to_owned(),
            format!("--nnodes={}", plan.nnodes),
            format!("--nproc-per-node={}", plan.nproc_per_node),
            format!("--max-restarts={}", plan.budgets.restarts),
            format!("--join-timeout={}", plan.join_timeout.as_secs_f64()),
            format!("--last-call={}", plan.last_call.as_secs_f64()),
            format!("--hosted-by={node_id}"),
        ]);
        args.extend(plan.plaintext.then(|| "--plaintext".to_owned()));
        args.extend(plan.budgets.rescales.map(|times| format!("--max-rescales={times}")));
        args.extend(plan.run_id.as_ref().map(|id| format!("--rdzv-id={id}")));
        args
    }

    fn logs(&self) -> String {
        self.plan.output.log_dir.display().to_string()
    }

    fn group(&self, place: Place, port: u16, join: JoinNodeRequest) -> WorkerGroup {
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
            coordinator: self.coordinator(port),
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

    /// What has become of the run, as our coordinator wrote it down: what it said last may not have been
    /// heard.
    fn history(&self) -> Option<journal::History> {
        let journal = Path::new(&self.spec.run.output_dir).join("coordinator");
        Some(journal::read(&journal).ok()?.history)
    }

    /// Whether people have asked for its end.
    fn is_stopped(&self) -> bool {
        self.history().is_some_and(|history| history.fate == Fate::Stopped)
    }

    /// The failure that ended the run.
    fn recorded_end(&self) -> Option<Failure> {
        self.history()?.failures.last().filter(|failure| failure.fatal).map(Failure::from)
    }

    async fn conclude(&self, report: &Report, hosting: bool) -> Outcome {
        match report.exit() {
            Exit::Done => {
                if hosting {
                    let summary =
                        summary::of_run(Path::new(&self.spec.run.output_dir), self.terminal.is_living());
                    let told = report.success_text(self.is_stopped());
                    let page = ending::leave_page(&self.spec.run.output_dir, &self.terminal).await;
                    let page = page
                        .map_or_else(String::new, |page| format!("\n  {:<26}{}", "report", page.display()));
                    ending::hand_over(format!("{told}\n{}{page}", summary.trim_end())).await;
                } else {
                    self.terminal.line(&report.left_text(&self.spec.run.name));
                }
                Ok(())
            }
            exit => {
                self.terminal.line(&report.failure_text(&self.spec.run.name));
                if hosting {
                    failure_file::write(Path::new(&self.spec.run.output_dir), report);
                    ending::leave_page(&self.spec.run.output_dir, &self.terminal).await;
                }
                Err(Failed::silent(exit))
            }
        }
    }
}

/// What it means that our coordinator has ended before this launcher had its place.
fn coordinator_ended_early(how: Ended, log_dir: &Path) -> Failed {
    match how {
        // It has said why.
        Ended::Code(code) if code != 0 && !host::died(how) => Failed::silent(Exit::of_child(code)),
        how => Failed::new(
            Exit::CoordinatorLost,
            format!(
                "the coordinator ended before the run began ({how}); see {}/coordinator.log",
                log_dir.display()
            ),
        ),
    }
}

/// Waits for the end of a coordinator of ours; for ever if there is none.
async fn ended(hosted: &mut Option<Hosted>) -> Ended {
    match hosted {
        Some(hosted) => hosted.host.ended().await,
        None => std::future::pending().await,
    }
}

fn this_program() -> Result<std::path::PathBuf, Failed> {
    std::env::current_exe()
        .map_err(|error| Failed::new(Exit::Internal, format!("cannot find this program: {error}")))
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
        for died in [Ended::Code(1), Ended::Code(101), Ended::Signal(9)] {
            let failed = of(died);
            assert_eq!(failed.exit, Exit::CoordinatorLost);
            assert!(failed.message.is_some_and(|text| text.ends_with("see runs/a/logs/coordinator.log")));
        }
        let refused = of(Ended::Code(3));
        assert_eq!((refused.exit, refused.message), (Exit::BadInput, None));
    }
}
