//! Who is let in, with real processes: strangers, tokens of other scopes, tokens that change, TLS between
//! addresses that are not loopback.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use coxswain_identity::{Scope, Token, Tokens};

use crate::support::{
    CoxProcess, cox, free_endpoint,
    processes::{children, wait_for},
    tiny::Tiny,
};

/// A run that goes on until it is stopped, once it has taken a step.
fn going_on(tiny: &Tiny, endpoint: &str, environment: &[(&str, &str)]) -> CoxProcess {
    let mut command = tiny.command(&["--rdzv-endpoint", endpoint]);
    command.envs(environment.iter().copied());
    let mut running = CoxProcess::of(command);
    running.wait_for("2/100000");
    running
}

/// A command about the run at an endpoint, with this to show; its exit code and what it says.
fn ask(words: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String) {
    answer(cox(words).envs(environment.iter().copied()))
}

fn answer(command: &mut Command) -> (Option<i32>, String) {
    let answer = command.output().expect("cox was built");
    let message = [answer.stdout, answer.stderr].concat();
    (answer.status.code(), String::from_utf8_lossy(&message).into_owned())
}

fn refused(told: (Option<i32>, String), expected: &str) {
    assert_eq!(told.0, Some(2), "{}", told.1);
    assert!(told.1.contains(expected), "{expected} in {}", told.1);
}

/// A file with a token of each scope.
fn file_of(dir: &Path, scopes: &[Scope]) -> (PathBuf, Vec<String>) {
    let path = dir.join("tokens");
    let add = |scope: &Scope| {
        let token = Token::fresh(*scope).expect("randomness");
        Tokens::add_to_file(&path, &token).expect("a file");
        token.secret().to_owned()
    };
    let tokens = scopes.iter().map(add).collect();
    (path, tokens)
}

/// Everything in the files below `dir`, with the files' names.
fn texts(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    let of = |path: PathBuf| match path.is_dir() {
        true => texts(&path),
        false => fs::read(&path).map(|bytes| vec![(path, bytes)]).unwrap_or_default(),
    };
    entries.flat_map(of).collect()
}

fn holds(text: &[u8], secret: &str) -> bool {
    text.windows(secret.len()).any(|window| window == secret.as_bytes())
}

#[test]
fn on_loopback_a_stranger_is_refused_and_the_run_s_own_commands_find_its_token() {
    let (tiny, endpoint) = (Tiny::new(100_000, 0), free_endpoint());
    let running = going_on(&tiny, &endpoint, &[]);
    for words in [["status", "--endpoint", &endpoint], ["stop", "--endpoint", &endpoint]] {
        refused(ask(&words, &[]), "requires a token: name its run (--run DIR)");
        let guess = Token::fresh(Scope::All).unwrap();
        refused(ask(&words, &[("COX_TOKEN", guess.secret())]), "the token is not this coordinator's");
    }
    let file = tiny.output().join("logs/token");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let text = fs::read_to_string(&file).unwrap();
    // What tells it from others: its beginning is its scope.
    let secret = text.trim().strip_prefix("cox_all_").expect("one of ours").to_owned();
    // Arguments are everybody's to read.
    for pid in children(running.pid()) {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        assert!(!arguments.is_empty() && !holds(&arguments, &secret), "process {pid}");
    }
    // A second launch is refused, and leaves the first one's token where it is though it has one of its own.
    let own = Token::fresh(Scope::All).unwrap();
    let again = answer(tiny.command(&[]).env("COX_TOKEN", own.secret()));
    assert!(again.0 != Some(0) && again.1.contains("another launcher is running this run"), "{}", again.1);
    let output = tiny.output().display().to_string();
    let (code, message) = ask(&["status", "--run", &output], &[]);
    assert_eq!(code, Some(0), "{message}");
    assert!(!message.contains(&secret));
    let (code, message) = ask(&["stop", "--run", &output], &[]);
    assert_eq!(code, Some(0), "{message}");
    let (status, printed) = running.finish();
    assert!(status.success() && !printed.contains(&secret), "{printed}");
    let told: Vec<_> = texts(&tiny.output()).into_iter().filter(|(_, text)| holds(text, &secret)).collect();
    let told: Vec<_> = told.into_iter().map(|(path, _)| path).collect();
    assert_eq!(told, [file], "no log, journal or record has the token");
}

#[test]
fn a_token_does_what_its_scope_says_and_a_changed_file_counts_without_a_restart() {
    let (tiny, endpoint, dir) = (Tiny::new(100_000, 0), free_endpoint(), tempfile::tempdir().unwrap());
    let (file, tokens) = file_of(dir.path(), &[Scope::All, Scope::Read, Scope::Worker, Scope::Control]);
    let [_, read, worker, control] = &tokens[..] else { panic!("four tokens") };
    let running = going_on(&tiny, &endpoint, &[("COX_TOKEN_FILE", &file.display().to_string())]);
    assert!(!tiny.output().join("logs/token").exists(), "it has the user's");
    let status = ["status", "--endpoint", &endpoint];
    for token in [read, worker, control] {
        let (code, message) = ask(&status, &[("COX_TOKEN", token)]);
        assert_eq!(code, Some(0), "{message}");
    }
    let stop = ["stop", "--endpoint", &endpoint];
    refused(
        ask(&stop, &[("COX_TOKEN", read)]),
        "this token has the scope `read`, but StopRun requires `control`",
    );
    refused(ask(&stop, &[("COX_TOKEN", worker)]), "this token has the scope `worker`");
    let worker_with = |token: &str| {
        let mut command = cox(&["worker"]);
        answer(command.env("COX_COORDINATOR", &endpoint).env("COX_TOKEN", token))
    };
    let (code, message) = worker_with(control);
    assert_eq!(code, Some(6), "{message}");
    assert!(
        message.contains("this token has the scope `control`, but GetRun requires `worker`"),
        "{message}"
    );

    let late = Token::fresh(Scope::Control).unwrap();
    refused(ask(&status, &[("COX_TOKEN", late.secret())]), "the token is not this coordinator's");
    Tokens::add_to_file(&file, &late).unwrap();
    wait_for("the changed file", || {
        (ask(&status, &[("COX_TOKEN", late.secret())]).0 == Some(0)).then_some(())
    });
    let (code, message) = ask(&stop, &[("COX_TOKEN", late.secret())]);
    assert_eq!(code, Some(0), "{message}");
    let (status, printed) = running.finish();
    assert!(status.success(), "{printed}");
}

#[test]
fn a_stranger_at_a_ranks_port_hears_nothing_and_holds_nothing_up() {
    let (tiny, endpoint, data) = (Tiny::new(3, 0), free_endpoint(), free_endpoint());
    let node = |rank: &str| {
        let flags = ["--nnodes=2", "--nproc-per-node=1", "--node-rank", rank, "--rdzv-endpoint", &endpoint];
        let mut command = tiny.command(&flags);
        if rank == "0" {
            command.env("COX_DATA_PORT", data.rsplit(':').next().expect("HOST:PORT"));
        }
        CoxProcess::of(command)
    };
    let first = node("0");
    // It listens before it has a neighbour.
    let mut stranger = wait_for("a rank's port", || TcpStream::connect(&data).ok());
    stranger.write_all(&[b'G'; 200]).unwrap();
    let second = node("1");
    for launcher in [first, second] {
        let (status, printed) = launcher.finish();
        assert!(status.success(), "{printed}");
    }
    let mut heard = Vec::new();
    // The end may be a reset: not all that it had sent was read.
    let _ = stranger.read_to_end(&mut heard);
    assert!(heard.is_empty(), "{heard:?}");
    let log = fs::read_to_string(tiny.output().join("logs/rank0000/stderr.log")).unwrap();
    assert!(log.contains("rejected a connection to the ring's port: not a rank of this run"), "{log}");
}

#[test]
fn a_file_of_tokens_that_others_may_read_starts_nothing() {
    let (tiny, dir) = (Tiny::new(3, 0), tempfile::tempdir().unwrap());
    let (file, _) = file_of(dir.path(), &[Scope::All]);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let told = answer(tiny.command(&[]).env("COX_TOKEN_FILE", &file));
    refused(told, "other users may read this token file (mode 0644): chmod 600");
    let (code, message) = answer(tiny.command(&[]).env("COX_TOKEN", "hunter2"));
    assert_eq!(code, Some(2), "{message}");
    assert!(
        message.contains("COX_TOKEN: the token is too short") && !message.contains("hunter2"),
        "{message}"
    );
}

/// An endpoint on this machine that is not loopback; nothing where there is only loopback.
fn endpoint_elsewhere() -> Option<String> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // Sends nothing. An address of documentation.
    socket.connect("192.0.2.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    let port = free_endpoint().rsplit_once(':')?.1.parse::<u16>().ok()?;
    let free = !ip.is_loopback() && TcpListener::bind((ip, port)).is_ok();
    if !free {
        eprintln!("skipped: this machine has no address but loopback");
    }
    free.then(|| format!("{ip}:{port}"))
}

#[test]
fn between_machines_tls_is_spoken_by_the_token_alone_and_who_has_another_learns_what_to_check() {
    let Some(endpoint) = endpoint_elsewhere() else { return };
    let tiny = Tiny::new(100_000, 0);
    let [ours, other] = [0, 1].map(|_| Token::fresh(Scope::All).unwrap());
    let node = |rank: &str, token: &Token| {
        let mut command = tiny.command(&[
            "--nnodes=2",
            "--nproc-per-node=1",
            "--node-rank",
            rank,
            "--rdzv-endpoint",
            &endpoint,
            "--rdzv-conf=join_timeout=60",
        ]);
        command.env("COX_TOKEN", token.secret());
        CoxProcess::of(command)
    };
    let mut first = node("0", &ours);
    first.wait_for("waiting for 2 workers");
    let (status, printed) = node("1", &other).finish();
    assert_eq!(status.code(), Some(6), "{printed}");
    assert!(printed.contains("does not know our token: check that COX_TOKEN"), "{printed}");
    let second = node("1", &ours);
    first.wait_for("2/100000");

    let shown = [("COX_TOKEN", ours.secret())];
    let (code, message) = ask(&["status", "--endpoint", &endpoint], &shown);
    assert_eq!(code, Some(0), "{message}");
    let in_clear = format!("http://{endpoint}");
    let told = ask(&["status", "--endpoint", &in_clear], &shown);
    refused(told, "this coordinator requires TLS from other machines, but this call was unencrypted");
    refused(ask(&["status", "--endpoint", &endpoint], &[]), "its identity cannot be verified: set COX_TOKEN");
    let (code, message) = ask(&["stop", "--endpoint", &endpoint], &shown);
    assert_eq!(code, Some(0), "{message}");
    for launcher in [first, second] {
        let (status, printed) = launcher.finish();
        assert!(status.success(), "{printed}");
    }
}

#[test]
fn plaintext_between_machines_is_asked_for_on_both_sides() {
    let Some(endpoint) = endpoint_elsewhere() else { return };
    let (tiny, token) = (Tiny::new(100_000, 0), Token::fresh(Scope::All).unwrap());
    let mut command = tiny.command(&["--plaintext", "--rdzv-endpoint", &endpoint]);
    command.env("COX_TOKEN", token.secret());
    let mut running = CoxProcess::of(command);
    running.wait_for("2/100000");
    let shown = [("COX_TOKEN", token.secret())];
    let output = tiny.output().display().to_string();
    // No file says so for the user: the token would go to anybody who can write in the directory of the run.
    for place in [["--endpoint", &endpoint], ["--run", &output]] {
        let told = ask(&[&["status"], &place[..]].concat(), &shown);
        refused(told, "does not speak TLS: if its coordinator was started with --plaintext");
    }
    let (code, message) = ask(&["stop", "--endpoint", &format!("http://{endpoint}")], &shown);
    assert_eq!(code, Some(0), "{message}");
    let (status, printed) = running.finish();
    assert!(status.success(), "{printed}");
}
