//! The environment a worker starts with: `torchrun`'s names for its place, ours for the coordinator.

use coxswain_identity::Whereabouts;
use coxswain_proto::run_spec::DeviceChoice;

use super::inputs::Env;

/// Tells workers where newer coordinators than theirs are announced: `NUMBER:DIR`.
pub const CLAIMS: &str = "COX_COORDINATOR_CLAIMS";

/// A launcher's place in the world, as the coordinator gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// This launcher's number.
    pub node_rank: u32,
    /// Launchers in all when the world is complete.
    pub nnodes: u32,
    /// Rank of its first worker.
    pub first_rank: u32,
    /// Workers it starts.
    pub nproc: u32,
    /// Workers in all when the world is complete.
    pub world_size: u32,
    /// Number of its first worker on the machine; not 0 only if several launchers share the machine.
    pub first_local_rank: u32,
    /// Workers on the machine.
    pub local_world_size: u32,
    /// The run's id.
    pub run_id: String,
    /// The number of the coordinator's claim to its role; 0 where nobody else may take it.
    pub claim: u64,
}

/// What workers of one launcher have in common.
#[derive(Clone, Debug)]
pub struct Common {
    /// The launcher's place.
    pub place: Place,
    /// Host of the coordinator.
    pub master_addr: String,
    /// Port of the coordinator.
    pub master_port: u16,
    /// Where workers call the coordinator.
    pub coordinator: Whereabouts,
    /// What they find tokens by, beside what they inherit.
    pub credentials: Vec<(&'static str, String)>,
    /// Address under which other machines reach this machine's workers.
    pub local_addr: String,
    /// What workers compute on.
    pub device: DeviceChoice,
    /// Compute threads of each worker.
    pub threads: usize,
    /// Milliseconds after which the allocator gives freed memory back; -1 is never.
    pub purge_delay: String,
    /// Workers that may be lost and replaced over the whole run.
    pub max_restarts: u32,
}

impl Common {
    /// Variables of the worker that is `local` among this launcher's workers, started for the `restart`-th
    /// time after its first.
    pub fn variables(&self, local: u32, restart: u32) -> Vec<(&'static str, String)> {
        let place = &self.place;
        let rank = place.first_rank + local;
        let mut variables = vec![
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", (place.first_local_rank + local).to_string()),
            ("WORLD_SIZE", place.world_size.to_string()),
            ("LOCAL_WORLD_SIZE", place.local_world_size.to_string()),
            ("GROUP_RANK", place.node_rank.to_string()),
            ("GROUP_WORLD_SIZE", place.nnodes.to_string()),
            ("NODE_RANK", place.node_rank.to_string()),
            ("ROLE_RANK", rank.to_string()),
            ("ROLE_WORLD_SIZE", place.world_size.to_string()),
            ("MASTER_ADDR", self.master_addr.clone()),
            ("MASTER_PORT", self.master_port.to_string()),
            ("TORCHELASTIC_RUN_ID", place.run_id.clone()),
            ("TORCHELASTIC_RESTART_COUNT", restart.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string()),
            ("OMP_NUM_THREADS", self.threads.to_string()),
            ("RAYON_NUM_THREADS", self.threads.to_string()),
            ("MIMALLOC_PURGE_DELAY", self.purge_delay.clone()),
            ("COX_COORDINATOR", self.coordinator.first().to_string()),
            ("COX_LOCAL_ADDR", self.local_addr.clone()),
            ("COX_DEVICE", self.device.to_string()),
        ];
        let claims = self.coordinator.claims();
        variables.extend(
            claims.map(|(claims, number)| (CLAIMS, format!("{number}:{}", claims.directory().display()))),
        );
        variables.extend(self.credentials.iter().cloned());
        variables
    }
}

/// Compute threads of each worker: what the user set for any program, else the configuration, else the cores
/// divided.
pub fn threads(env: Env<'_>, configured: Option<usize>, cores: usize, workers_on_machine: u32) -> usize {
    let set =
        |name: &str| env(name).and_then(|text| text.trim().parse().ok()).filter(|threads| *threads >= 1);
    set("RAYON_NUM_THREADS")
        .or_else(|| set("OMP_NUM_THREADS"))
        .or(configured)
        .unwrap_or_else(|| (cores / workers_on_machine.max(1) as usize).max(1))
}

/// When a worker's allocator gives memory back: what the user set, else never. A step frees what the next one
/// takes again, and pages that went back to the kernel in between have to be cleared again: a quarter of the
/// processor time of a step. The peak stays.
pub fn purge_delay(env: Env<'_>) -> String {
    env("MIMALLOC_PURGE_DELAY").unwrap_or_else(|| "-1".to_owned())
}

#[cfg(test)]
mod tests {
    use coxswain_identity::{Address, claims::Claims};

    use super::*;

    #[test]
    fn a_worker_learns_its_place_in_torchruns_words() {
        let place = Place {
            node_rank: 1,
            nnodes: 2,
            first_rank: 4,
            nproc: 4,
            world_size: 8,
            first_local_rank: 0,
            local_world_size: 4,
            run_id: "r".into(),
            claim: 3,
        };
        let common = Common {
            place,
            master_addr: "n3".into(),
            master_port: 29400,
            coordinator: Whereabouts::until_moved(
                Address::parse("http://n3:29400"),
                Claims::of_run("/runs/a".as_ref()),
                3,
            ),
            credentials: vec![("COX_TOKEN_FILE", "/runs/a/logs/token".into())],
            local_addr: "10.0.0.4".into(),
            device: DeviceChoice::Cuda,
            threads: 2,
            purge_delay: "-1".into(),
            max_restarts: 3,
        };
        let variables = common.variables(2, 1);
        let get = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.as_str());
        for (name, value) in [
            ("RANK", "6"),
            ("LOCAL_RANK", "2"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("GROUP_RANK", "1"),
            ("NODE_RANK", "1"),
            ("MASTER_ADDR", "n3"),
            ("MASTER_PORT", "29400"),
            ("TORCHELASTIC_RUN_ID", "r"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("TORCHELASTIC_MAX_RESTARTS", "3"),
            ("COX_DEVICE", "cuda"),
            ("OMP_NUM_THREADS", "2"),
            ("MIMALLOC_PURGE_DELAY", "-1"),
            ("COX_COORDINATOR", "http://n3:29400"),
            ("COX_COORDINATOR_CLAIMS", "3:/runs/a/coordinator/claims"),
            ("COX_TOKEN_FILE", "/runs/a/logs/token"),
        ] {
            assert_eq!(get(name), Some(value), "{name}");
        }
    }

    #[test]
    fn threads_are_the_users_or_the_cores_divided() {
        let none = |_: &str| None;
        assert_eq!(threads(&none, None, 8, 3), 2);
        assert_eq!(threads(&none, None, 2, 4), 1);
        assert_eq!(threads(&none, Some(5), 8, 2), 5);
        let omp = |name: &str| (name == "OMP_NUM_THREADS").then(|| "3".to_owned());
        assert_eq!(threads(&omp, Some(5), 8, 2), 3);
        let broken = |name: &str| (name == "OMP_NUM_THREADS").then(|| "x".to_owned());
        assert_eq!(threads(&broken, Some(5), 8, 2), 5);
    }

    #[test]
    fn freed_memory_is_kept_unless_the_user_says_otherwise() {
        assert_eq!(purge_delay(&|_: &str| None), "-1");
        let set = |name: &str| (name == "MIMALLOC_PURGE_DELAY").then(|| "100".to_owned());
        assert_eq!(purge_delay(&set), "100");
    }
}
