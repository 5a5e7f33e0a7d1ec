//! Resolution tables: which place wins, and what is refused.

use super::*;

const SPEC: &str = "\
run: {name: a, output_dir: runs/a}
model: {path: m}
data: {path: d, cameras: [front]}
train: {steps: 10, global_batch: 64, micro_batch: 2}
";

/// Flags and variables of one launch, and an override of the spec.
#[derive(Default)]
struct Case<'a> {
    flags: LaunchFlags,
    env: &'a [(&'a str, &'a str)],
    spec: &'a [&'a str],
    gpus: Option<usize>,
}

fn machine() -> LocalMachine {
    LocalMachine { host: "n4".into(), cores: 8, addresses: vec!["10.0.0.4".parse().unwrap()] }
}

fn resolve(case: &Case<'_>) -> Result<Plan, String> {
    let overrides: Vec<String> = case.spec.iter().map(|o| (*o).to_owned()).collect();
    let spec = RunSpec::from_yaml(SPEC, "run.yaml", &overrides, crate::tasks::schemas()).unwrap();
    let env = |name: &str| case.env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
    let machine = machine();
    let gpus = || case.gpus.ok_or(NoGpus::NoDriver);
    Plan::resolve(&Sources { flags: &case.flags, env: &env, spec: &spec, machine: &machine, gpus: &gpus })
        .map_err(|failed| failed.message.unwrap())
}

fn text(value: &str) -> Option<String> {
    Some(value.to_owned())
}

/// The flags of a launch that gives one of them.
fn with(set: impl FnOnce(&mut LaunchFlags)) -> LaunchFlags {
    let mut flags = LaunchFlags::default();
    set(&mut flags);
    flags
}

const SRUN: &[(&str, &str)] = &[
    ("SLURM_JOB_ID", "3001"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_PROCID", "1"),
    ("SLURM_NODEID", "1"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_STEP_NUM_TASKS", "2"),
    ("SLURM_STEP_NODELIST", "n[3-4]"),
];

#[test]
fn alone_it_is_one_worker_with_a_coordinator_on_a_free_loopback_port() {
    let plan = resolve(&Case::default()).unwrap();
    assert_eq!((plan.nnodes, plan.nproc_per_node, plan.node_rank), (Nodes::fixed(1), 1, None));
    assert_eq!(plan.budgets, Budgets { restarts: 3, rescales: None, spares: 0 });
    assert_eq!(plan.endpoint.to_string(), "127.0.0.1:0");
    assert_eq!(plan.hosting, Hosting::Yes);
    assert_eq!(plan.output.log_dir, Path::new("runs/a/logs"));
    assert_eq!(plan.output.redirects.streams(0), Streams::BOTH);
    assert_eq!(plan.output.tee.streams(0), Streams::NONE);
    assert_eq!(plan.shutdown_timeout, Duration::from_secs(30));
}

#[test]
fn a_flag_beats_pet_beats_slurm_beats_the_configuration() {
    let spec: &[&str] = &["launch.nproc_per_node=3"];
    let pet: Vec<(&str, &str)> = SRUN
        .iter()
        .copied()
        .chain([("PET_NPROC_PER_NODE", "4"), ("PET_NODE_RANK", "0"), ("PET_RDZV_ID", "p")])
        .collect();
    let flags = LaunchFlags {
        nproc_per_node: text("5"),
        nnodes: text("4"),
        node_rank: text("3"),
        rdzv_endpoint: text("far:1"),
        rdzv_id: text("mine"),
        ..LaunchFlags::default()
    };
    let counts = |case: &Case<'_>| {
        let plan = resolve(case).unwrap();
        (plan.nproc_per_node, plan.nnodes.max, plan.node_rank, plan.endpoint.to_string(), plan.run_id)
    };
    let configured = Case { spec, ..Case::default() };
    assert_eq!(counts(&configured), (3, 1, None, "127.0.0.1:0".into(), None));
    let slurm = Case { spec, env: SRUN, ..Case::default() };
    assert_eq!(counts(&slurm), (3, 2, Some(1), "n3:29401".into(), text("3001")));
    let pet = Case { spec, env: &pet, ..Case::default() };
    assert_eq!(counts(&pet), (4, 2, Some(0), "n3:29401".into(), text("p")));
    let all = Case { flags, ..pet };
    assert_eq!(counts(&all), (5, 4, Some(3), "far:1".into(), text("mine")));
}

#[test]
fn one_machine_of_a_slurm_step_can_be_used_alone() {
    let flags = LaunchFlags { nnodes: text("1"), ..LaunchFlags::default() };
    let plan = resolve(&Case { flags, env: SRUN, ..Case::default() }).unwrap();
    assert_eq!(
        (plan.node_rank, plan.endpoint.to_string(), plan.hosting),
        (None, "127.0.0.1:0".into(), Hosting::Yes)
    );
}

#[test]
fn several_slurm_tasks_a_machine_are_launchers_of_one_worker_each() {
    let mut env = SRUN.to_vec();
    env.retain(|(name, _)| !["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"].contains(name));
    env.extend([("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "6"), ("SLURM_LOCALID", "2")]);
    let plan = resolve(&Case { env: &env, spec: &["launch.nproc_per_node=3"], ..Case::default() }).unwrap();
    assert_eq!((plan.nnodes, plan.nproc_per_node, plan.node_rank), (Nodes::fixed(8), 1, Some(6)));
    assert_eq!(plan.share, Some(slurm::Share { local_rank: 2, of: 4 }));
}

#[test]
fn standalone_ignores_slurm() {
    let flags = LaunchFlags { standalone: true, ..LaunchFlags::default() };
    let plan = resolve(&Case { flags, env: SRUN, ..Case::default() }).unwrap();
    assert_eq!((plan.nnodes, plan.hosting), (Nodes::fixed(1), Hosting::Yes));
    let plan = resolve(&Case { env: &[("PET_STANDALONE", "1")], ..Case::default() }).unwrap();
    assert_eq!(plan.endpoint.to_string(), "127.0.0.1:0");
}

#[test]
fn standalone_listens_nowhere_else_whatever_is_given() {
    let flags = LaunchFlags { standalone: true, rdzv_endpoint: text("head:29400"), ..LaunchFlags::default() };
    let plan = resolve(&Case { flags, spec: &["launch.listen=0.0.0.0:5000"], ..Case::default() }).unwrap();
    assert_eq!((plan.endpoint.to_string(), plan.hosting), ("127.0.0.1:0".into(), Hosting::Yes));
}

#[test]
fn who_starts_the_coordinator() {
    let case = |nnodes: &str, endpoint: &str, rank: Option<&str>, conf: Option<&str>| {
        let flags = LaunchFlags {
            nnodes: text(nnodes),
            rdzv_endpoint: text(endpoint),
            node_rank: rank.and_then(text),
            rdzv_conf: conf.and_then(text),
            ..LaunchFlags::default()
        };
        resolve(&Case { flags, ..Case::default() }).unwrap().hosting
    };
    assert_eq!(case("2", "n4:29400", None, None), Hosting::IfFree);
    assert_eq!(case("2", "10.0.0.9:29400", None, None), Hosting::No);
    assert_eq!(case("2", "10.0.0.9:29400", Some("0"), None), Hosting::Yes);
    assert_eq!(case("2", "n4:29400", Some("1"), None), Hosting::No);
    assert_eq!(case("2", "n4:29400", Some("0"), Some("is_host=false")), Hosting::No);
    assert_eq!(case("2", "10.0.0.9:29400", None, Some("is_host=1,join_timeout=5")), Hosting::Yes);
    assert_eq!(case("1", "127.0.0.1:29400", None, None), Hosting::Yes);
}

#[test]
fn endpoints_have_a_default_port_and_several_spellings() {
    let of = |flags: LaunchFlags| {
        resolve(&Case { flags, ..Case::default() }).map(|plan| plan.endpoint.to_string())
    };
    let endpoint = |value: &str| of(LaunchFlags { rdzv_endpoint: text(value), ..LaunchFlags::default() });
    assert_eq!(endpoint("head").unwrap(), "head:29400");
    assert_eq!(endpoint("[::1]:7").unwrap(), "[::1]:7");
    assert_eq!(endpoint("[::1]").unwrap(), "[::1]:29400");
    for wrong in ["head:x", ":1", "::1", "head:99999"] {
        assert!(endpoint(wrong).unwrap_err().starts_with(&format!("--rdzv-endpoint {wrong}: expected")));
    }
    let master = LaunchFlags { master_addr: text("head"), master_port: text("7"), ..LaunchFlags::default() };
    assert_eq!(of(master).unwrap(), "head:7");
    let port_only = LaunchFlags { master_port: text("7"), ..LaunchFlags::default() };
    assert_eq!(of(port_only).unwrap(), "127.0.0.1:7");
    let listen = Case { spec: &["launch.listen=127.0.0.1:5000"], ..Case::default() };
    assert_eq!(resolve(&listen).unwrap().endpoint.port, 5000);
}

#[test]
fn workers_per_machine_can_be_counted() {
    let count = |value: &str| {
        let flags = LaunchFlags { nproc_per_node: text(value), ..LaunchFlags::default() };
        resolve(&Case { flags, ..Case::default() }).map(|plan| plan.nproc_per_node)
    };
    assert_eq!(count("auto"), Ok(8));
    assert_eq!(count("cpu"), Ok(8));
    assert_eq!(count("2"), Ok(2));
    assert!(count("gpu").unwrap_err().starts_with("--nproc-per-node gpu: no NVIDIA driver"));
}

#[test]
fn mistakes_name_the_flag_or_the_variable() {
    let none = LaunchFlags::default;
    type Mistake<'a> = (LaunchFlags, &'a [(&'a str, &'a str)], &'a str);
    let cases: Vec<Mistake<'_>> = vec![
        (with(|flags| flags.nnodes = text("4:1")), &[], "--nnodes 4:1: expected N, or MIN:MAX"),
        (with(|flags| flags.nnodes = text("0")), &[], "--nnodes 0: expected N"),
        (
            with(|flags| flags.nnodes = text("2")),
            &[],
            "--nnodes 2: several machines need an address to meet at",
        ),
        (
            LaunchFlags { nnodes: text("2"), standalone: true, ..none() },
            &[],
            "--nnodes 2: --standalone is for one",
        ),
        (with(|flags| flags.nproc_per_node = text("0")), &[], "--nproc-per-node 0: at least one worker"),
        (with(|flags| flags.nproc_per_node = text("many")), &[], "--nproc-per-node many: expected a number"),
        (
            with(|flags| flags.nproc_per_node = text("65")),
            &[],
            "train.global_batch: a batch of 64 cannot be shared",
        ),
        (with(|flags| flags.node_rank = text("1")), &[], "--node-rank 1: there are 1 machines"),
        (with(|flags| flags.max_restarts = text("-1")), &[], "--max-restarts -1: expected a whole number"),
        (with(|flags| flags.max_rescales = text("x")), &[], "--max-rescales x: expected a whole number"),
        (none(), &[("PET_MAX_RESTARTS", "x")], "PET_MAX_RESTARTS x: expected a whole number"),
        (with(|flags| flags.rdzv_backend = text("etcd")), &[], "--rdzv-backend etcd: the coordinator is"),
        (
            with(|flags| flags.rdzv_conf = text("is_hots=1")),
            &[],
            "--rdzv-conf is_hots=1: `is_hots` is unknown",
        ),
        (
            with(|flags| flags.rdzv_conf = text("is_host=x")),
            &[],
            "--rdzv-conf is_host x: expected true or false",
        ),
        (
            with(|flags| flags.local_ranks_filter = text("a")),
            &[],
            "--local-ranks-filter a: expected local ranks",
        ),
        (with(|flags| flags.shutdown_timeout = text("-1")), &[], "--shutdown-timeout -1: expected a number"),
        (none(), &[("PET_MONITOR_INTERVAL", "x")], "PET_MONITOR_INTERVAL x: expected a number of seconds"),
        (none(), &[("PET_TEE", "9")], "PET_TEE 9: expected 0, 1, 2 or 3"),
    ];
    for (flags, env, expected) in cases {
        let error = resolve(&Case { flags, env, ..Case::default() }).unwrap_err();
        assert!(error.starts_with(expected), "{error}\n  instead of\n{expected}");
    }
}

#[test]
fn what_torchrun_scripts_pass_is_taken() {
    let flags = LaunchFlags {
        nnodes: text("1:1"),
        max_restarts: text("0"),
        monitor_interval: text("0.1"),
        rdzv_backend: text("c10d"),
        rdzv_conf: text("join_timeout=60,last_call_timeout=15,"),
        local_ranks_filter: text("0, 1"),
        ..LaunchFlags::default()
    };
    let plan = resolve(&Case { flags, ..Case::default() }).unwrap();
    assert_eq!(plan.join_timeout, Duration::from_secs(60));
    assert_eq!(plan.last_call, Duration::from_secs(15));
    assert_eq!(plan.budgets.restarts, 0);
    assert_eq!(plan.output.filter, Some([0, 1].into()));
}

#[test]
fn a_range_of_machines_makes_an_elastic_world_with_two_budgets() {
    let flags = LaunchFlags {
        nnodes: text("1:4"),
        nproc_per_node: text("2"),
        rdzv_endpoint: text("n4:29400"),
        max_rescales: text("9"),
        ..LaunchFlags::default()
    };
    let plan = resolve(&Case { flags, env: &[("PET_MAX_RESTARTS", "7")], ..Case::default() }).unwrap();
    assert_eq!(plan.nnodes, Nodes { min: 1, max: 4 });
    assert_eq!(plan.ranks(plan.nnodes.max), 8);
    assert_eq!(plan.budgets, Budgets { restarts: 7, rescales: Some(9), spares: 0 });
    assert_eq!(plan.hosting, Hosting::IfFree);
    assert_eq!(plan.last_call, Duration::from_secs(30));
}

#[test]
fn spares_are_some_of_the_workers_and_never_all_of_them() {
    let of = |nnodes, spares| {
        let flags = LaunchFlags {
            nnodes: text(nnodes),
            nproc_per_node: text("2"),
            rdzv_endpoint: text("n4:29400"),
            spares: text(spares),
            ..LaunchFlags::default()
        };
        resolve(&Case { flags, ..Case::default() })
    };
    let ranks = |plan: Plan| (plan.budgets.spares, plan.ranks(plan.nnodes.min), plan.ranks(plan.nnodes.max));
    assert_eq!(of("1", "1").map(ranks), Ok((1, 1, 1)));
    assert_eq!(of("3", "2").map(ranks), Ok((2, 4, 4)));
    assert_eq!(of("1:3", "1").map(ranks), Ok((1, 2, 5)));
    let refused = of("1", "2").unwrap_err();
    assert!(refused.starts_with("--spares 2: must be less than the 2 workers in all"), "{refused}");
    assert!(of("1", "one").unwrap_err().contains("--spares"));
}

#[test]
fn workers_are_counted_by_gpus_where_there_are_gpus_and_by_cores_elsewhere() {
    let workers = |nproc: &str, device: &str, gpus: Option<usize>| {
        let flags = LaunchFlags { nproc_per_node: text(nproc), device: text(device), ..Default::default() };
        resolve(&Case { flags, gpus, ..Case::default() }).map(|plan| plan.nproc_per_node)
    };
    for (nproc, device, gpus, expected) in [
        ("auto", "auto", Some(4), 4),
        ("auto", "auto", None, 8),
        ("auto", "cpu", Some(4), 8),
        ("gpu", "cuda", Some(2), 2),
        ("gpu", "auto", Some(3), 3),
        ("cpu", "auto", Some(3), 8),
        ("5", "cuda", Some(1), 5),
    ] {
        assert_eq!(workers(nproc, device, gpus), Ok(expected), "{nproc} on {device} with {gpus:?}");
    }
    let error = workers("gpu", "auto", None).unwrap_err();
    assert!(error.starts_with("--nproc-per-node gpu: no NVIDIA driver"), "{error}");
    let error = workers("gpu", "cpu", Some(2)).unwrap_err();
    assert!(error.contains("compute on the CPU"), "{error}");
}

#[test]
fn gpus_that_are_asked_for_and_not_here_are_refused_and_the_error_names_the_setting() {
    let flags = || LaunchFlags { device: text("cuda"), ..Default::default() };
    let error = resolve(&Case { flags: flags(), ..Case::default() }).unwrap_err();
    assert!(error.starts_with("--device cuda: no NVIDIA driver (libcuda.so.1"), "{error}");
    let spec: &[&str] = &["launch.device=cuda"];
    let error = resolve(&Case { spec, ..Case::default() }).unwrap_err();
    assert!(error.starts_with("launch.device cuda: no NVIDIA driver"), "{error}");
    let plan = resolve(&Case { flags: flags(), gpus: Some(1), ..Case::default() }).unwrap();
    assert_eq!(plan.device, DeviceChoice::Cuda);
    let flags = LaunchFlags { device: text("tpu"), ..Default::default() };
    let error = resolve(&Case { flags, ..Case::default() }).unwrap_err();
    assert_eq!(error, "--device tpu: expected auto, cpu or cuda");
}
