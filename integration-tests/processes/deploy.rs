//! What `configs/deploy` tells schedulers to run: as far as that can be checked without one.

use std::{fs, path::PathBuf, process::Command};

use super::support::root;

fn file(name: &str) -> (PathBuf, String) {
    let path = root().join("configs/deploy").join(name);
    let text = fs::read_to_string(&path).expect("the file is there");
    (path, text)
}

/// Runs `cox` with these words up to the point where it has read and resolved its flags.
fn understands(words: &[&str]) {
    let flags: Vec<&str> = words.iter().copied().filter(|word| word.starts_with("--")).collect();
    let subcommand = words[0];
    let help =
        Command::new(env!("CARGO_BIN_EXE_cox")).args([subcommand, "--help"]).output().expect("cox runs");
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    for flag in flags {
        let name = flag.split('=').next().unwrap_or(flag);
        assert!(
            help.contains(&format!("{name} ")) || help.contains(&format!("{name}\n")),
            "{subcommand} has no {name}"
        );
    }
}

/// Workers may use what the scheduler gives after SIGTERM, less what it takes to end them and say so.
fn assert_time_for_a_checkpoint(allowed: &str, given: u64) {
    let allowed: u64 = allowed.parse().expect("seconds");
    assert!((given - 20..=given - 5).contains(&allowed), "{allowed} of {given} s");
}

#[test]
fn the_slurm_script_is_bash_and_its_commands_are_ours() {
    let (path, text) = file("slurm.sbatch");
    let checked = Command::new("bash").arg("-n").arg(&path).output().expect("bash is there");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    if let Ok(lint) = Command::new("shellcheck").arg(&path).output() {
        assert!(lint.status.success(), "{}", String::from_utf8_lossy(&lint.stdout));
    }
    let commands: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once(" cox ").map(|(_, rest)| rest.split_whitespace().collect()))
        .collect();
    assert_eq!(commands.iter().map(|words| words[0]).collect::<Vec<_>>(), ["selftest", "run"]);
    commands.iter().for_each(|words| understands(words));
    let warned =
        text.lines().find_map(|line| line.strip_prefix("#SBATCH --signal=TERM@")).expect("a warning");
    let allowed =
        commands[1].iter().skip_while(|word| **word != "--shutdown-timeout").nth(1).expect("a time");
    assert_time_for_a_checkpoint(allowed, warned.parse().expect("seconds"));
    // One launcher a machine is what makes `gpu` the number of workers.
    assert!(text.contains("#SBATCH --ntasks-per-node=1") && text.contains("--nproc-per-node gpu"));
}

#[test]
fn the_jobset_is_yaml_and_starts_as_many_machines_as_its_flags_say() {
    let (_, text) = file("jobset.yaml");
    let json: serde_json::Value =
        coxswain_proto::config::from_yaml(&text, "jobset.yaml").expect("it is YAML");
    assert_eq!(json["kind"], "JobSet");
    let job = &json["spec"]["replicatedJobs"][0];
    let (name, indexed) = (job["name"].as_str().expect("a name"), &job["template"]["spec"]);
    let container = &indexed["template"]["spec"]["containers"][0];
    assert_eq!(container["command"], serde_json::json!(["cox"]));
    let args: Vec<&str> =
        container["args"].as_array().expect("a list").iter().map(|arg| arg.as_str().expect("text")).collect();
    understands(&args);
    let allowed = args.iter().find_map(|arg| arg.strip_prefix("--shutdown-timeout=")).expect("a time");
    let grace = indexed["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().expect("seconds");
    assert_time_for_a_checkpoint(allowed, grace);
    assert_eq!(indexed["template"]["spec"]["securityContext"]["runAsNonRoot"], true);
    let machines = indexed["completions"].as_u64().expect("a number");
    assert_eq!(indexed["parallelism"].as_u64(), Some(machines));
    assert!(args.contains(&format!("--nnodes={machines}").as_str()), "{args:?}");
    let run = json["metadata"]["name"].as_str().expect("a name");
    let port = container["ports"][0]["containerPort"].as_u64().expect("a number");
    let endpoint = format!("--rdzv-endpoint={run}-{name}-0-0.{run}:{port}");
    assert!(args.contains(&endpoint.as_str()), "{endpoint} in {args:?}");
    let names: Vec<_> = container["env"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|variable| variable["name"].clone())
        .collect();
    assert!(names.contains(&"COX_TOKEN".into()) && names.contains(&"JOB_COMPLETION_INDEX".into()));
}

#[test]
fn the_network_policy_lets_only_the_jobs_own_pods_and_the_monitoring_in() {
    let read = |name: &str| -> serde_json::Value {
        coxswain_proto::config::from_yaml(&file(name).1, name).expect("it is YAML")
    };
    let (policy, jobset) = (read("networkpolicy.yaml"), read("jobset.yaml"));
    assert_eq!(policy["kind"], "NetworkPolicy");
    let label = serde_json::json!({"jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]});
    let spec = &policy["spec"];
    assert_eq!(spec["podSelector"]["matchLabels"], label);
    assert_eq!(spec["policyTypes"], serde_json::json!(["Ingress"]));
    let [own, monitoring] = &spec["ingress"].as_array().expect("a list")[..] else { panic!("{spec:#}") };
    assert_eq!(own["from"][0]["podSelector"]["matchLabels"], label);
    assert_eq!(own.get("ports"), None, "the ring and NCCL choose their ports");
    let container =
        &jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(monitoring["ports"][0]["port"], container["ports"][0]["containerPort"]);
    assert_eq!(monitoring["ports"].as_array().map(Vec::len), Some(1));
}

#[test]
fn the_image_is_built_by_the_readmes_command_with_the_projects_compiler() {
    let (_, text) = file("Dockerfile");
    let readme = fs::read_to_string(root().join("README.md")).expect("a README");
    let toolchain = fs::read_to_string(root().join("rust-toolchain.toml")).expect("a toolchain");
    assert!(readme.contains("cargo build --release") && text.contains("RUN cargo build --release --locked"));
    let channel = toolchain.lines().find_map(|line| line.strip_prefix("channel = ")).expect("a channel");
    let version = channel.trim_matches('"').rsplit_once('.').expect("a patch number").0;
    assert!(text.contains(&format!("FROM rust:{version}-")), "rust {version}");
    assert!(text.contains("USER 1000:1000\nENTRYPOINT [\"cox\"]"), "nothing runs as root");
    for line in text.lines().filter(|line| line.contains("cox selftest")) {
        let words: Vec<&str> = line.split(" cox ").nth(1).expect("after cox").split_whitespace().collect();
        understands(&words);
    }
}

#[test]
fn a_node_without_a_gpu_passes_on_the_cpu_and_is_refused_on_cuda() {
    let run = |device: &str| {
        Command::new(env!("CARGO_BIN_EXE_cox"))
            .args(["selftest", "--device", device])
            .output()
            .expect("cox runs")
    };
    let cpu = run("cpu");
    let page = String::from_utf8_lossy(&cpu.stdout);
    assert!(cpu.status.success(), "{page}{}", String::from_utf8_lossy(&cpu.stderr));
    assert!(
        page.contains("all_reduce, ring, 2 ranks") && page.trim_end().ends_with("checks passed"),
        "{page}"
    );
    if page.contains("none usable") {
        let cuda = run("cuda");
        assert_eq!(cuda.status.code(), Some(2));
        let message = String::from_utf8_lossy(&cuda.stderr);
        assert!(message.contains("--device cuda: "), "{message}");
    }
}
