//! The launch plan: every setting resolved, from the first place that says something.
//!
//! Order: flag, `PET_*`, Slurm (only under `srun`), configuration, default. Nothing here touches the network
//! or starts a process.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Duration,
};

use coxswain_identity::Address;
use coxswain_proto::{
    limits,
    run_spec::{DeviceChoice, RunSpec},
};
use coxswain_worker::device::NoGpus;

use super::{
    data_place::DataPlace,
    flags::LaunchFlags,
    inputs::{Env, SettingText, boolean},
    machine::LocalMachine,
    rdzv_conf::{RdzvConf, seconds},
    slurm,
    streams::{PerRank, Streams},
    world::{Budgets, Nodes},
};
use crate::exit::CliError;

/// `torchrun`'s port for the rendezvous.
const DEFAULT_PORT: u16 = 29_400;
/// `torchrun`'s time for workers to leave after a signal.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// Everything `cox run` needs to know before it starts a process.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Launchers in the world.
    pub nnodes: Nodes,
    /// Workers this launcher starts; the same on all launchers.
    pub nproc_per_node: u32,
    /// What they compute on.
    pub device: DeviceChoice,
    /// This launcher's place, if it is fixed.
    pub node_rank: Option<u32>,
    /// The run's id, if it is fixed.
    pub run_id: Option<String>,
    /// Where the coordinator listens.
    pub endpoint: Endpoint,
    /// Whether this launcher starts it.
    pub hosting: Hosting,
    /// How the coordinator is spoken with.
    pub speech: Speech,
    /// Under which address others reach this machine's workers, if it is fixed.
    pub local_addr: Option<String>,
    /// This launcher's share of the machine, if several launchers run on it (Slurm tasks).
    pub share: Option<slurm::Share>,
    /// What the run may spend on repairs.
    pub budgets: Budgets,
    /// How long to wait for as many machines as are needed.
    pub join_timeout: Duration,
    /// How long, after that, to wait for as many as are allowed.
    pub last_call: Duration,
    /// How long workers may take to leave after a signal.
    pub shutdown_timeout: Duration,
    /// Output of workers.
    pub output: OutputPlan,
}

/// How the coordinator is spoken with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speech {
    /// Whether nothing is encrypted between machines.
    pub plaintext: bool,
    /// Whether this launcher speaks for its workers.
    pub one_stream: bool,
}

/// Where the coordinator listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Name or address; IPv6 in brackets.
    pub host: String,
    /// Port; 0 takes a free one and is only possible where the coordinator is started.
    pub port: u16,
}

/// Whether this launcher starts the coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosting {
    /// It does.
    Yes,
    /// Another launcher does, or it runs already.
    No,
    /// It tries, and joins if another launcher on this machine was faster.
    IfFree,
}

/// Output of workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputPlan {
    /// Directory of the logs.
    pub log_dir: PathBuf,
    /// Streams that go to files.
    pub redirects: PerRank,
    /// Streams that go to files and the console.
    pub tee: PerRank,
    /// Local ranks whose output reaches the console; all if absent.
    pub filter: Option<BTreeSet<u32>>,
}

/// What a plan is made from.
pub struct Sources<'a> {
    /// The command line.
    pub flags: &'a LaunchFlags,
    /// The environment.
    pub env: Env<'a>,
    /// The run.
    pub spec: &'a RunSpec,
    /// Where we are.
    pub machine: &'a LocalMachine,
    /// GPUs that workers here could use; asked only if that matters, because the driver takes a while to
    /// start.
    pub gpus: &'a dyn Fn() -> Result<usize, NoGpus>,
}

impl Plan {
    /// Where the coordinator is called that this plan names, if it listens at `port`.
    pub fn coordinator(&self, port: u16) -> Address {
        Address::of(&self.endpoint.host, port).plaintext(self.speech.plaintext)
    }

    /// Resolves every setting.
    pub fn resolve(from: &Sources<'_>) -> Result<Self, CliError> {
        from.refuse_what_has_no_effect()?;
        let step = match from.standalone()? {
            true => None,
            false => slurm::Step::from_env(from.env)?,
        };
        let nnodes = from.nnodes(step.as_ref())?;
        // Flags that ask for another number of machines than the job step has do not describe this step.
        let step = step.filter(|step| step.launchers == nnodes.max);
        let node_rank = from.node_rank(step.as_ref(), nnodes)?;
        let conf = from.rdzv_conf()?;
        let endpoint = from.endpoint(step.as_ref(), nnodes)?;
        let device = from.device()?;
        let nproc_per_node = from.nproc_per_node(step.as_ref(), device)?;
        // The last worker has the highest port.
        DataPlace::from_env(from.env, nproc_per_node.saturating_sub(1))?;
        let plan = Self {
            nnodes,
            nproc_per_node,
            device,
            node_rank,
            run_id: from
                .given("rdzv-id", from.flags.rdzv_id.as_ref())
                .map(|given| given.text)
                .or_else(|| from.job()),
            hosting: from.hosting(&conf, node_rank, nnodes, &endpoint),
            speech: Speech {
                plaintext: from.plaintext()?,
                one_stream: from.one_stream(nnodes.max.saturating_mul(nproc_per_node))?,
            },
            endpoint,
            local_addr: from.given("local-addr", from.flags.local_addr.as_ref()).map(|given| given.text),
            share: step.and_then(|step| step.share),
            budgets: Budgets::parse(
                from.given("max-restarts", from.flags.max_restarts.as_ref()),
                from.given("max-rescales", from.flags.max_rescales.as_ref()),
                from.given("spares", from.flags.spares.as_ref()),
            )?,
            join_timeout: conf.join_timeout.unwrap_or(limits::RENDEZVOUS_TIMEOUT),
            last_call: conf.last_call.unwrap_or(limits::LAST_CALL_TIMEOUT),
            shutdown_timeout: from.shutdown_timeout()?,
            output: from.output()?,
        };
        if plan.endpoint.port == 0 && plan.hosting != Hosting::Yes {
            return Err(CliError::usage(
                "--rdzv-endpoint: port 0 is any free port, which other machines cannot know; give a number",
            ));
        }
        if plan.ranks(plan.nnodes.max) == 0 {
            let (spares, workers) =
                (plan.budgets.spares, plan.nnodes.max.saturating_mul(plan.nproc_per_node));
            return Err(CliError::usage(format!(
                "--spares {spares}: must be less than the {workers} workers in all (--nnodes, --nproc-per-node)"
            )));
        }
        from.spec.check_world(plan.ranks(plan.nnodes.max) as usize)?;
        Ok(plan)
    }

    /// Ranks when so many launchers are there.
    pub fn ranks(&self, nodes: u32) -> u32 {
        let of_all = self.nnodes.max.saturating_mul(self.nproc_per_node).saturating_sub(self.budgets.spares);
        nodes.saturating_mul(self.nproc_per_node).min(of_all)
    }
}

impl Sources<'_> {
    fn given(&self, name: &str, flag: Option<&String>) -> Option<SettingText> {
        SettingText::flag_or_pet(name, flag, self.env)
    }

    fn job(&self) -> Option<String> {
        slurm::job_id(self.env)
    }

    fn standalone(&self) -> Result<bool, CliError> {
        if self.flags.standalone {
            return Ok(true);
        }
        SettingText::variable("PET_STANDALONE", self.env).map_or(Ok(false), |given| boolean(&given))
    }

    fn plaintext(&self) -> Result<bool, CliError> {
        if self.flags.plaintext {
            return Ok(true);
        }
        SettingText::variable("PET_PLAINTEXT", self.env).map_or(Ok(false), |given| boolean(&given))
    }

    /// Where there are as many workers, or it is asked for.
    fn one_stream(&self, workers: u32) -> Result<bool, CliError> {
        if self.flags.one_stream {
            return Ok(true);
        }
        let given = SettingText::variable("PET_ONE_STREAM", self.env);
        given.map_or(Ok(workers >= limits::ONE_STREAM_FROM), |given| boolean(&given))
    }

    fn refuse_what_has_no_effect(&self) -> Result<(), CliError> {
        if let Some(given) = self.given("monitor-interval", self.flags.monitor_interval.as_ref()) {
            given.parse::<f64>("a number of seconds")?;
        }
        if let Some(given) = self.given("rdzv-backend", self.flags.rdzv_backend.as_ref())
            && !["c10d", "static"].contains(&given.text.as_str())
        {
            return Err(
                given.wrong("the coordinator is the rendezvous; leave the flag out, or use c10d or static")
            );
        }
        Ok(())
    }

    fn nnodes(&self, step: Option<&slurm::Step>) -> Result<Nodes, CliError> {
        let Some(given) = self.given("nnodes", self.flags.nnodes.as_ref()) else {
            return Ok(Nodes::fixed(step.map_or(1, |step| step.launchers)));
        };
        let nodes = Nodes::parse(&given)?;
        if nodes.max > 1 && self.standalone()? {
            return Err(given.wrong("--standalone is for one machine; remove one of the two"));
        }
        Ok(nodes)
    }

    /// What workers compute on; GPUs that were asked for must be here.
    fn device(&self) -> Result<DeviceChoice, CliError> {
        let (device, source) = match self.given("device", self.flags.device.as_ref()) {
            None => (self.spec.launch.device, "launch.device".to_owned()),
            Some(given) => (given.parse("auto, cpu or cuda")?, given.source),
        };
        if device == DeviceChoice::Cuda {
            (self.gpus)().map_err(|missing| CliError::usage(format!("{source} cuda: {missing}")))?;
        }
        Ok(device)
    }

    fn nproc_per_node(&self, step: Option<&slurm::Step>, device: DeviceChoice) -> Result<u32, CliError> {
        let Some(given) = self.given("nproc-per-node", self.flags.nproc_per_node.as_ref()) else {
            let one_each = step.and_then(|step| step.share).map(|_| 1);
            let configured = self.spec.launch.nproc_per_node.and_then(|workers| u32::try_from(workers).ok());
            return Ok(one_each.or(configured).unwrap_or(1));
        };
        let count = |workers: usize| u32::try_from(workers).unwrap_or(1);
        let cores = count(self.machine.cores);
        match given.text.trim() {
            "auto" if device == DeviceChoice::Cpu => Ok(cores),
            "auto" => Ok((self.gpus)().map_or(cores, count)),
            "cpu" => Ok(cores),
            "gpu" if device == DeviceChoice::Cpu => {
                Err(given
                    .wrong("workers compute on the CPU (--device, launch.device); use `cpu` or a number"))
            }
            "gpu" => (self.gpus)().map(count).map_err(|missing| given.wrong(missing)),
            _ => match given.parse("a number of at least 1, auto, cpu or gpu")? {
                0 => Err(given.wrong("at least one worker is needed")),
                workers => Ok(workers),
            },
        }
    }

    fn node_rank(&self, step: Option<&slurm::Step>, nnodes: Nodes) -> Result<Option<u32>, CliError> {
        let Some(given) = self.given("node-rank", self.flags.node_rank.as_ref()) else {
            return Ok(step.map(|step| step.rank));
        };
        let rank: u32 = given.parse("a whole number")?;
        if rank >= nnodes.max {
            return Err(given.wrong(format_args!("there are {} machines, numbered from 0", nnodes.max)));
        }
        Ok(Some(rank))
    }

    fn rdzv_conf(&self) -> Result<RdzvConf, CliError> {
        let given = self.given("rdzv-conf", self.flags.rdzv_conf.as_ref());
        given.map_or(Ok(RdzvConf::default()), |given| RdzvConf::parse(&given))
    }

    fn endpoint(&self, step: Option<&slurm::Step>, nnodes: Nodes) -> Result<Endpoint, CliError> {
        let flags = self.flags;
        if self.standalone()? {
            return Ok(Endpoint::on_loopback(0));
        }
        if let Some(given) = self.given("rdzv-endpoint", flags.rdzv_endpoint.as_ref()) {
            return Endpoint::parse(&given, DEFAULT_PORT);
        }
        let port = match self.given("master-port", flags.master_port.as_ref()) {
            Some(given) => Some(given.parse::<u16>("a port number")?),
            None => None,
        };
        if let Some(given) = self.given("master-addr", flags.master_addr.as_ref()) {
            return Ok(Endpoint { host: given.text, port: port.unwrap_or(DEFAULT_PORT) });
        }
        if let Some(step) = step.filter(|step| step.launchers > 1) {
            let port = port.unwrap_or_else(|| slurm::port(self.job().as_deref()));
            return Ok(Endpoint { host: step.first_host.clone(), port });
        }
        if let Some(listen) = &self.spec.launch.listen {
            let given = SettingText { text: listen.clone(), source: "launch.listen".to_owned() };
            return Endpoint::parse(&given, DEFAULT_PORT);
        }
        if nnodes.max > 1 {
            return Err(CliError::usage(format!(
                "--nnodes {nnodes}: several machines need an address to meet at; give \
                 --rdzv-endpoint HOST:PORT, the same on all of them"
            )));
        }
        Ok(Endpoint::on_loopback(port.unwrap_or(0)))
    }

    fn hosting(
        &self,
        conf: &RdzvConf,
        node_rank: Option<u32>,
        nnodes: Nodes,
        endpoint: &Endpoint,
    ) -> Hosting {
        match (conf.is_host, node_rank) {
            (Some(true), _) => Hosting::Yes,
            (Some(false), _) => Hosting::No,
            (None, Some(0)) => Hosting::Yes,
            (None, Some(_)) => Hosting::No,
            (None, None) if !self.machine.is_local(&endpoint.host) => Hosting::No,
            (None, None) if nnodes.max == 1 => Hosting::Yes,
            (None, None) => Hosting::IfFree,
        }
    }

    fn shutdown_timeout(&self) -> Result<Duration, CliError> {
        let given = self.given("shutdown-timeout", self.flags.shutdown_timeout.as_ref());
        given.map_or(Ok(SHUTDOWN_TIMEOUT), |given| seconds(&given))
    }

    fn output(&self) -> Result<OutputPlan, CliError> {
        let flags = self.flags;
        let streams = |name, flag: Option<&String>, absent| match self.given(name, flag) {
            Some(given) => PerRank::parse(&given),
            None => Ok(PerRank::All(absent)),
        };
        let filter = match self.given("local-ranks-filter", flags.local_ranks_filter.as_ref()) {
            Some(given) => {
                let ranks = given.text.split(',').map(|rank| rank.trim().parse());
                Some(
                    ranks
                        .collect::<Result<_, _>>()
                        .map_err(|_| given.wrong("expected local ranks such as 0,2"))?,
                )
            }
            None => None,
        };
        let log_dir = match self.given("log-dir", flags.log_dir.as_ref()) {
            Some(given) => PathBuf::from(given.text),
            None => Path::new(&self.spec.run.output_dir).join("logs"),
        };
        Ok(OutputPlan {
            log_dir,
            redirects: streams("redirects", flags.redirects.as_ref(), Streams::BOTH)?,
            tee: streams("tee", flags.tee.as_ref(), Streams::NONE)?,
            filter,
        })
    }
}

impl Endpoint {
    fn on_loopback(port: u16) -> Self {
        Self { host: "127.0.0.1".to_owned(), port }
    }

    /// Reads `HOST:PORT`, `HOST`, `[IPV6]:PORT`.
    pub fn parse(given: &SettingText, default_port: u16) -> Result<Self, CliError> {
        let text = given.text.trim();
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
            _ => (text, None),
        };
        let port = match port {
            Some(port) => port.parse().map_err(|_| given.wrong("expected HOST:PORT"))?,
            None => default_port,
        };
        let bracketed = host.starts_with('[') && host.ends_with(']');
        if host.is_empty() || (host.contains(':') && !bracketed) {
            return Err(given.wrong("expected HOST:PORT; write an IPv6 address in brackets"));
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests;
