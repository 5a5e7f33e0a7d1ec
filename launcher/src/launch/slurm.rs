//! What Slurm says about a job step.
//!
//! Only a process started by `srun` is part of a step; in a batch script Slurm describes the whole
//! allocation, of which a single `cox run` is one process on one machine, and only the job's id is taken.
//!
//! ```text
//! srun --ntasks-per-node=1 cox run ...    every task launches the workers of its machine    nodes = machines
//! srun --ntasks-per-node=4 cox run ...    every task launches one worker                    nodes = tasks
//! srun --ntasks-per-node=8 --pty bash     a shell, which is one of the tasks: what is started in it launches
//!                                         by itself, as in a batch script
//! ```

use super::inputs::{Env, SettingText};
use crate::exit::CliError;

/// A launcher's place in a job step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Launchers in the step.
    pub launchers: u32,
    /// This launcher's number among them.
    pub rank: u32,
    /// This launcher's number on its machine, and how many there are; absent if it is alone there.
    pub share: Option<Share>,
    /// The step's first machine.
    pub first_host: String,
}

/// One launcher among several on a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Number on the machine.
    pub local_rank: u32,
    /// Launchers on the machine.
    pub of: u32,
}

/// The job's id, in or out of a step.
pub fn job_id(env: Env<'_>) -> Option<String> {
    env("SLURM_JOB_ID").or_else(|| env("SLURM_JOBID"))
}

/// A port that all launchers of a job agree on and other jobs on the same machine rarely have.
pub fn port(job_id: Option<&str>) -> u16 {
    let number: u64 = job_id.and_then(|id| id.parse().ok()).unwrap_or(0);
    // Above torchrun's 29400, below the ephemeral ports of Linux (32768).
    29_400 + u16::try_from(number % 3_000).unwrap_or(0)
}

impl Step {
    /// Reads the step from the environment; nothing outside `srun`.
    pub fn from_env(env: Env<'_>) -> Result<Option<Self>, CliError> {
        // What a shell starts has the shell's variables; a task of Slurm's own is told its process. One that
        // a script starts without `exec` is taken for a shell's.
        let is_task = env("SLURM_TASK_PID").is_some_and(|pid| pid == std::process::id().to_string());
        let is_shell = env("SLURM_PTY_PORT").is_some() && !is_task;
        if is_shell || env("SLURM_STEP_ID").is_none() || env("SLURM_PROCID").is_none() {
            return Ok(None);
        }
        let either =
            |a: &str, b: &str| SettingText::variable(a, env).or_else(|| SettingText::variable(b, env));
        let number = |given: Option<SettingText>, absent: u32| match given {
            Some(given) => given.parse("a whole number"),
            None => Ok(absent),
        };
        let machines = number(either("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), 1)?;
        let tasks = number(either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), machines)?;
        let list = either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
        let first_host = match &list {
            Some(given) => {
                first_host(&given.text).ok_or_else(|| given.wrong("cannot read the list of machines"))?
            }
            None => "localhost".to_owned(),
        };
        if tasks <= machines {
            let rank = number(SettingText::variable("SLURM_NODEID", env), 0)?;
            return Ok(Some(Self { launchers: machines, rank, share: None, first_host }));
        }
        let local_rank = number(SettingText::variable("SLURM_LOCALID", env), 0)?;
        let rank = number(SettingText::variable("SLURM_PROCID", env), 0)?;
        let share = Some(Share { local_rank, of: tasks.div_ceil(machines.max(1)) });
        Ok(Some(Self { launchers: tasks, rank, share, first_host }))
    }
}

/// The first machine of Slurm's compressed list: `gpu[07-09,12],login` is `gpu07`.
pub fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(open) = rest.find(['[', ',']) {
        host.push_str(&rest[..open]);
        if rest[open..].starts_with(',') {
            return (!host.is_empty()).then_some(host);
        }
        let close = open + rest[open..].find(']')?;
        let first = rest[open + 1..close].split([',', '-']).next()?;
        if first.is_empty() {
            return None;
        }
        host.push_str(first);
        rest = &rest[close + 1..];
    }
    host.push_str(rest);
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_machine_is_read_from_every_form_of_list() {
        for (list, first) in [
            ("node7", "node7"),
            ("node[001-003,007],gpu-a", "node001"),
            ("a,b,c", "a"),
            ("rack[2-3]n[05-09]", "rack2n05"),
            ("gpu[3].cluster", "gpu3.cluster"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        for broken in ["", "node[1-2", "node[]", ",a"] {
            assert_eq!(first_host(broken), None, "{broken}");
        }
    }

    fn step(variables: &[(&str, &str)]) -> Option<Step> {
        let env = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Step::from_env(&env).unwrap()
    }

    const BATCH: &[(&str, &str)] = &[("SLURM_JOB_ID", "77"), ("SLURM_NNODES", "2"), ("SLURM_PROCID", "0")];

    #[test]
    fn a_batch_script_is_no_step() {
        assert_eq!(step(BATCH), None);
    }

    #[test]
    fn one_task_a_machine_launches_that_machines_workers() {
        let mut variables = BATCH.to_vec();
        variables.extend([
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NUM_NODES", "2"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_NODEID", "1"),
            ("SLURM_STEP_NODELIST", "n[4-5]"),
        ]);
        let expected = Step { launchers: 2, rank: 1, share: None, first_host: "n4".into() };
        assert_eq!(step(&variables), Some(expected));
    }

    #[test]
    fn a_shell_that_slurm_has_opened_is_no_step_either() {
        let mut variables = BATCH.to_vec();
        variables.extend([
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_STEP_NUM_NODES", "1"),
            ("SLURM_PTY_PORT", "36541"),
        ]);
        assert_eq!(step(&variables), None, "its seven siblings launch nothing");
        let own = std::process::id().to_string();
        variables.push(("SLURM_TASK_PID", &own));
        assert_eq!(step(&variables).map(|step| step.launchers), Some(8), "`srun cox run` in such a shell");
    }

    #[test]
    fn several_tasks_a_machine_launch_one_worker_each() {
        let variables = [
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NUM_NODES", "2"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_PROCID", "6"),
            ("SLURM_LOCALID", "2"),
            ("SLURM_NODEID", "1"),
            ("SLURM_STEP_NODELIST", "n4,n5"),
        ];
        let share = Some(Share { local_rank: 2, of: 4 });
        let expected = Step { launchers: 8, rank: 6, share, first_host: "n4".into() };
        assert_eq!(step(&variables), Some(expected));
    }

    #[test]
    fn a_jobs_port_is_the_same_everywhere_and_not_ephemeral() {
        assert_eq!(port(Some("4711")), 29_400 + 1_711);
        assert_eq!(port(None), 29_400);
        assert!(port(Some("2999")) < 32_768);
    }
}
