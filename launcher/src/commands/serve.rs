//! `cox serve`: a trained policy for robots, over openpi's WebSocket protocol.

use std::{
    net::{SocketAddr, ToSocketAddrs},
    path::PathBuf,
};

use clap::Args;
use coxswain_identity::{Scope, Tokens};
use coxswain_proto::{human, run_spec::DeviceChoice};
use coxswain_serve::{Door, Model, Port, ServeError, Server, Tls};

use crate::{
    commands::{runtime::block_on, spec_args::of_run},
    credentials,
    exit::{CliError, Exit, Outcome},
    launch::inputs::process_env,
    render::say,
    supervise::signals,
    tasks::{chosen_device, tasks},
};

/// Flags of `cox serve`.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// Output directory of a finished run, or of `cox export`
    #[arg(value_name = "RUN_DIR")]
    run_dir: PathBuf,
    /// Overrides of the run as it was trained, such as model.path=... if the model has moved
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Data set whose statistics are used, for a policy trained on several [default: serve.set]
    #[arg(long, value_name = "NAME")]
    set: Option<String>,
    /// Device: auto, cpu or cuda [default: launch.device]
    #[arg(long, value_name = "auto|cpu|cuda")]
    device: Option<DeviceChoice>,
    /// Address to listen on
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8000")]
    listen: String,
    /// File with the token that clients must present (openpi's api_key) [default: COX_TOKEN, or none on
    /// loopback]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// TLS certificate chain, PEM: the certificate first, then its issuers (wss://)
    #[arg(long, value_name = "FILE", env = "COX_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate, PEM, without a passphrase
    #[arg(long, value_name = "FILE", env = "COX_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Listen without TLS on an address other than loopback: token and observations travel unencrypted
    #[arg(long, conflicts_with = "tls_cert")]
    plaintext: bool,
    /// Maximum number of observations in one forward pass
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
    max_batch: u16,
}

/// Serves until a signal arrives.
pub fn execute(args: &ServeArgs) -> Outcome {
    if let Some(change) = args.set.as_ref().filter(|name| name.contains('=')) {
        let told = "--set takes the name of a data set; write an override without --set";
        return Err(CliError::usage(format!("--set {change}: {told}: {}", human::word(change))));
    }
    let set = args.set.iter().map(|name| format!("serve.set={name}"));
    let overrides: Vec<_> = args.overrides.iter().cloned().chain(set).collect();
    let spec = of_run(&args.run_dir, &overrides)?;
    let door = args.door()?;
    let port = Port::bind(args.address(&door)?)?;
    let scheme = if door.tls.is_some() { "wss" } else { "ws" };
    let device = chosen_device(args.device.unwrap_or(spec.launch.device))?;
    let (dir, max_batch) = (args.run_dir.clone(), usize::from(args.max_batch));
    let kind = spec.task.kind.clone();
    let start = move || {
        let model = Model::start(max_batch, move || {
            let responder = tasks().responder(&spec, &dir, device)?;
            responder.ok_or_else(|| {
                CliError::usage(format!("task {kind} trains no policy, so there is nothing to serve"))
            })
        })?;
        Server::start(port, model, door).map_err(CliError::from)
    };
    tracing::info!("loading the policy of {} on {device}", args.run_dir.display());
    // A thread of its own: a signal that arrives while a large model is read does not wait for it.
    let (tell, started) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || tell.send(start()));
    block_on(async {
        let mut signals = signals::catch().map_err(CliError::internal)?;
        let server = tokio::select! {
            // Nothing is under way yet that a signal could interrupt.
            number = signals.next() => return Err(CliError::silent(Exit::Signal(number))),
            started = started => started.map_err(|_| CliError::new(Exit::Internal, "the server did not start"))??,
        };
        say(format_args!("serving at {scheme}://{} on {device}", server.address()));
        let number = signals.next().await;
        tracing::info!("{}: finishing requests under way, then exiting", signals::name(number));
        let left = server.stop();
        if left > 0 {
            tracing::warn!(clients = left, "clients did not disconnect in time");
        }
        Ok(())
    })
}

impl ServeArgs {
    fn door(&self) -> Result<Door, CliError> {
        let tls = match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => Some(Tls::load(cert, key)?),
            _ => None,
        };
        Ok(Door { token: self.token()?, tls })
    }

    /// As everywhere: of 128 bits at least, and from a file that nobody else may read or own.
    fn token(&self) -> Result<Option<String>, CliError> {
        let refused = |error| CliError::usage(format!("--token-file: {error}"));
        let tokens = match &self.token_file {
            Some(path) => Some(Tokens::of_file(path).map_err(refused)?),
            None => credentials::of_env(&process_env)?.tokens().cloned(),
        };
        Ok(tokens.and_then(|tokens| tokens.for_scope(Scope::All)).map(|token| token.secret().to_owned()))
    }

    /// Where to listen, if strangers there are kept out.
    fn address(&self, door: &Door) -> Result<SocketAddr, CliError> {
        let refused = |problem: &str| CliError::usage(format!("--listen {}: {problem}", self.listen));
        let found = match self.listen.parse::<u16>() {
            // A port alone is one of this machine's own.
            Ok(port) => ("127.0.0.1", port).to_socket_addrs(),
            Err(_) => self.listen.to_socket_addrs(),
        };
        let refused_as =
            |error: std::io::Error| refused(&format!("{error}; expected HOST:PORT, such as 127.0.0.1:8000"));
        let address = found.map_err(refused_as)?.next().ok_or_else(|| refused("no address"))?;
        if address.ip().is_loopback() {
            return Ok(address);
        }
        if door.token.is_none() {
            return Err(refused(
                "without a token any machine that reaches it could use the policy; give --token-file or COX_TOKEN, for instance \
                 COX_TOKEN=$(cox token)",
            ));
        }
        if door.tls.is_none() && !self.plaintext {
            return Err(refused(
                "token and images would travel unencrypted: give --tls-cert and --tls-key, or --plaintext \
                 if the network is trusted, \
                 or listen on 127.0.0.1 behind a proxy or a tunnel that encrypts",
            ));
        }
        Ok(address)
    }
}

impl From<ServeError> for CliError {
    fn from(error: ServeError) -> Self {
        match error {
            ServeError::Port { .. } | ServeError::Tls { .. } | ServeError::WithoutTls => Self::usage(error),
            ServeError::Thread(_) => Self::new(Exit::Internal, error),
            ServeError::WarmUp(_) => Self::new(Exit::BadInput, error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt, chown},
    };

    use super::*;

    fn args(listen: &str, plaintext: bool) -> ServeArgs {
        ServeArgs {
            run_dir: PathBuf::new(),
            overrides: Vec::new(),
            set: None,
            device: None,
            listen: listen.into(),
            token_file: None,
            tls_cert: None,
            tls_key: None,
            plaintext,
            max_batch: 1,
        }
    }

    fn address(listen: &str, plaintext: bool, token: Option<&str>) -> Result<SocketAddr, String> {
        let door = Door { token: token.map(str::to_owned), tls: None };
        args(listen, plaintext).address(&door).map_err(|failed| failed.message.unwrap_or_default())
    }

    #[test]
    fn a_file_of_tokens_that_others_may_read_or_own_opens_no_port() {
        const SECRET: &str = "cox_all_0123456789abcdef0123456789abcdef";
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let token = |text: &str, mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let args = ServeArgs { token_file: Some(path.clone()), ..args("127.0.0.1:0", false) };
            args.token().map_err(|failed| failed.message.unwrap_or_default())
        };
        assert_eq!(token(SECRET, 0o600).unwrap().as_deref(), Some(SECRET));
        let open = token(SECRET, 0o644).unwrap_err();
        assert!(open.starts_with("--token-file: ") && open.contains("chmod 600"), "{open}");
        let short = token("a", 0o600).unwrap_err();
        assert!(short.contains("line 1: the token is too short"), "{short}");
        // Only root can give a file away.
        if !fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
            || chown(&path, Some(1000), None).is_err()
        {
            return eprintln!("skipped: a file of another user is made by root alone");
        }
        let theirs = token(SECRET, 0o600).unwrap_err();
        assert!(theirs.contains("1000"), "{theirs}");
    }

    #[test]
    fn off_loopback_there_is_a_token_and_plaintext_is_asked_for() {
        let token = Some("secret");
        assert!(address("127.0.0.1:0", false, None).is_ok());
        assert!(address("[::1]:0", false, None).is_ok());
        assert!(address("0.0.0.0:0", true, None).is_err_and(|problem| problem.contains("COX_TOKEN")));
        let in_clear = address("0.0.0.0:0", false, token).unwrap_err();
        assert!(in_clear.contains("--tls-cert") && in_clear.contains("--plaintext"), "{in_clear}");
        assert!(address("0.0.0.0:0", true, token).is_ok());
        assert_eq!(address("8000", false, None).unwrap().to_string(), "127.0.0.1:8000");
        assert!(
            address("70000", true, token).is_err_and(|problem| problem.contains("such as 127.0.0.1:8000"))
        );
        assert!(address("nowhere", true, token).is_err_and(|problem| problem.contains("--listen nowhere")));
    }
}
