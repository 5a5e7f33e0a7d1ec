//! The coordinator as this launcher's child: of its own launch, or in place of one whose machine is gone.

use std::{
    cell::RefCell,
    net::TcpListener,
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
};

use coxswain_coordinator::journal::{self, History};
use coxswain_identity::{
    Address, Door,
    claims::{Claim, Claims, HeldClaim},
};
use coxswain_nn::files::replace;
use coxswain_proto::{run_spec::RunSpec, v1::RunSpecDocument};
use tokio::sync::mpsc;

use crate::{
    bucket::{self, Owner, UploadJob, Uploader},
    credentials::OfLaunch,
    endpoint::{self, PublishedEndpoint},
    exit::{CliError, Exit, Outcome},
    launch::{inputs::process_env, machine::LocalMachine, plan::Plan, rendezvous},
    supervise::{
        child::{Program, this_program},
        console::{Console, Terminal},
        failure_file,
        host::{Host, HostConfig},
    },
    telemetry::LogFlags,
};

/// What this launcher has to do with its run's coordinator.
pub struct CoordinatorSetup<'a> {
    /// The run.
    pub spec: &'a RunSpec,
    /// How it is launched.
    pub plan: &'a Plan,
    /// Which log a coordinator writes.
    pub log: &'a LogFlags,
    /// Where it would run.
    pub machine: &'a LocalMachine,
    /// What it is shown.
    pub credentials: &'a OfLaunch,
    /// Where its lines are shown.
    pub terminal: &'a Arc<Terminal>,
    /// This launcher's id.
    pub node_id: String,
    /// Hears why our coordinator is one too many: another launcher has taken the role, or the run.
    pub superseded: mpsc::Sender<String>,
    /// Nothing until a coordinator is started here.
    pub signs: RefCell<Option<Signs>>,
    /// The launcher whose role this one has claimed.
    pub replaced: RefCell<Option<String>>,
}

/// What says to others that the coordinator is here, until the launch is over.
pub struct Signs {
    _published: PublishedEndpoint,
    _held: Option<HeldClaim>,
    uploader: Option<Rc<Uploader>>,
}

/// What is said where another launcher has the role.
const ROLE_TAKEN: &str = "another launcher has replaced this launcher's coordinator, which had stopped responding: this launcher and its workers exit";

impl CoordinatorSetup<'_> {
    /// Whether the coordinator is, or was, this launcher's.
    pub fn is_here(&self) -> bool {
        self.signs.borrow().is_some()
    }

    /// Starts the coordinator of this launch.
    pub fn begin(&self, listener: TcpListener, port: u16) -> Result<Host, CliError> {
        self.refuse_without_tls(&listener)?;
        let address = self.plan.coordinator(port);
        let published = PublishedEndpoint::write(self.output_dir(), &address.to_string())?;
        // From here on the run is ours.
        self.credentials.tidy(self.output_dir(), &process_env);
        failure_file::remove(self.output_dir());
        // Nobody else could take the place of a launcher that is alone.
        let claims = (self.plan.nnodes.max > 1).then(|| self.claims());
        let claim = claims.map(|claims| claims.take(&address.to_string(), &self.node_id)).transpose();
        let claim = claim.map_err(|error| self.unannounced(&error))?;
        let take = |address: String| bucket::take(self.spec, &address, &self.node_id);
        let owner = bucket::address(self.spec).map(take).transpose()?;
        let host = self.start(listener, published, claim.as_ref(), Vec::new())?;
        self.upload(owner)?;
        Ok(host)
    }

    /// Starts a coordinator in place of the one with the claim `last`, whose machine is gone. Nothing if
    /// another launcher was faster.
    pub fn take_over(&self, last: &Claim) -> Result<Option<Host>, CliError> {
        let listener = rendezvous::listen_instead(self.plan)
            .map_err(|error| CliError::new(Exit::Rendezvous, format!("cannot listen: {error}")))?;
        self.refuse_without_tls(&listener)?;
        let port = listener.local_addr().map_err(|error| CliError::new(Exit::Internal, error))?.port();
        let host = rendezvous::local_addr(self.plan, self.machine, port);
        let address = Address::of(&host, port).plaintext(self.plan.speech.plaintext).to_string();
        // What a full disk refuses is refused before the role is claimed.
        self.keep_spec()?;
        let claimed = self.claims().succeed(last.number, &address, &self.node_id);
        let Some(claim) = claimed.map_err(|error| self.unannounced(&error))? else { return Ok(None) };
        // After a claim of ours that no coordinator has followed, it still is the launcher before that.
        if last.launcher != self.node_id {
            *self.replaced.borrow_mut() = Some(last.launcher.clone());
        }
        let gone = self.replaced.borrow().clone().unwrap_or_default();
        let published = PublishedEndpoint::instead(self.output_dir(), &address)?;
        let flags = vec!["--restarted".to_owned(), format!("{}={gone}", HostConfig::INSTEAD)];
        let host = self.start(listener, published, Some(&claim), flags)?;
        // Nothing waits for the bucket here: the thread takes the run when it answers.
        if let Err(failed) = self.upload(None) {
            let why = failed.message.unwrap_or_default();
            self.terminal.line(&format!("training continues, but checkpoints are no longer uploaded: {why}"));
        }
        Ok(Some(host))
    }

    /// Begins to keep the run in its bucket, if it has one.
    fn upload(&self, owner: Option<Owner>) -> Outcome {
        let Some(address) = bucket::address(self.spec) else { return Ok(()) };
        let of = UploadJob {
            spec: self.spec.clone(),
            address,
            launcher: self.node_id.clone(),
            terminal: Arc::clone(self.terminal),
            superseded: self.superseded.clone(),
        };
        let uploader = Uploader::start(of, owner).map_err(|error| CliError::new(Exit::Internal, error))?;
        if let Some(signs) = self.signs.borrow_mut().as_mut() {
            signs.uploader = Some(Rc::new(uploader));
        }
        Ok(())
    }

    /// What keeps the run in its bucket, if this launcher does.
    pub fn uploader(&self) -> Option<Rc<Uploader>> {
        self.signs.borrow().as_ref().and_then(|signs| signs.uploader.clone())
    }

    /// What has become of the run, as our coordinator wrote it down: what it said last may not have been
    /// heard.
    pub fn history(&self) -> Option<History> {
        Some(journal::read(&self.output_dir().join("coordinator")).ok()?.history)
    }

    fn start(
        &self,
        listener: TcpListener,
        published: PublishedEndpoint,
        claim: Option<&Claim>,
        mut flags: Vec<String>,
    ) -> Result<Host, CliError> {
        flags.extend(claim.map(|claim| format!("--claim={}", claim.number)));
        let args = [self.arguments()?, flags].concat();
        let program = Program { path: this_program()?, args, env: self.credentials.variables() };
        let console = Arc::clone(self.terminal) as Arc<dyn Console>;
        let log_dir = self.plan.output.log_dir.clone();
        // Before the coordinator, which would live on without a sign of life.
        let hold = |claim: &Claim| {
            let superseded = self.superseded.clone();
            // A launcher that no longer listens is ending.
            self.claims().hold(claim.number, move || {
                let _ = superseded.blocking_send(ROLE_TAKEN.to_owned());
            })
        };
        let held = claim.map(hold).transpose().map_err(|error| CliError::new(Exit::Internal, error))?;
        let host = Host::start(HostConfig { program, listener, log_dir, console }).map_err(|error| {
            CliError::new(Exit::Internal, format!("cannot start the coordinator: {error}"))
        })?;
        *self.signs.borrow_mut() = Some(Signs { _published: published, _held: held, uploader: None });
        Ok(host)
    }

    /// What the coordinator would refuse, before it is started.
    fn refuse_without_tls(&self, listener: &TcpListener) -> Outcome {
        let plan = self.plan;
        let address = listener.local_addr().map_err(|error| CliError::new(Exit::Internal, error))?;
        let door = Door::new(&self.credentials.credentials, plan.speech.plaintext)?;
        door.check(address).map_err(|problem| {
            CliError::usage(format!("{}: other machines can reach this address: {problem}", plan.endpoint))
        })
    }

    fn arguments(&self) -> Result<Vec<String>, CliError> {
        let (spec, plan) = (self.keep_spec()?, self.plan);
        let mut args = vec!["coordinator".to_owned(), spec.display().to_string()];
        args.extend(self.log.as_args());
        args.extend([
            "--listen-stdin".to_owned(),
            format!("--nnodes={}", plan.nnodes),
            format!("--nproc-per-node={}", plan.nproc_per_node),
            format!("--spares={}", plan.budgets.spares),
            format!("--max-restarts={}", plan.budgets.restarts),
            format!("--join-timeout={}", plan.join_timeout.as_secs_f64()),
            format!("--last-call={}", plan.last_call.as_secs_f64()),
            format!("--hosted-by={}", self.node_id),
        ]);
        args.extend(plan.speech.plaintext.then(|| "--plaintext".to_owned()));
        args.extend(plan.budgets.rescales.map(|times| format!("--max-rescales={times}")));
        args.extend(plan.run_id.as_ref().map(|id| format!("--rdzv-id={id}")));
        Ok(args)
    }

    /// Writes down the run as it was launched. Every coordinator of this launch reads that: the user's file
    /// may be edited meanwhile.
    fn keep_spec(&self) -> Result<PathBuf, CliError> {
        let path = self.plan.output.log_dir.join(endpoint::SPEC_FILE);
        let document = RunSpecDocument::from(self.spec);
        replace(&path, |path| std::fs::write(path, document.json))
            .map_err(|error| CliError::usage(format!("{}: {error}", path.display())))?;
        Ok(path)
    }

    fn claims(&self) -> Claims {
        Claims::of_run(self.output_dir())
    }

    fn output_dir(&self) -> &Path {
        Path::new(&self.spec.run.output_dir)
    }

    fn unannounced(&self, error: &std::io::Error) -> CliError {
        CliError::usage(format!(
            "{}: cannot write the coordinator's address: {error}",
            self.claims().directory().display()
        ))
    }
}
