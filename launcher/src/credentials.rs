//! What this process shows of itself, and by what it knows others: tokens and certificates, from the
//! environment or from a run's directory.
//!
//! A run that never leaves its machine needs no token of the user's: its launcher makes one and keeps it in
//! `OUTPUT_DIR/logs/token`, which its user alone can read. Its workers and coordinator are told the file's
//! place, commands find it with the run.

use std::{
    fs,
    path::{Path, PathBuf},
};

use coxswain_identity::{CertificateFiles, Credentials, IdentityError, Scope, Token, Tokens};

use crate::{exit::CliError, launch::inputs::Env};

/// A token of the environment.
pub const TOKEN: &str = "COX_TOKEN";
/// A file of tokens.
pub const TOKEN_FILE: &str = "COX_TOKEN_FILE";

/// Where a run has its own token, below its output directory.
const OWN: &str = "logs/token";

impl From<IdentityError> for CliError {
    fn from(error: IdentityError) -> Self {
        Self::usage(error)
    }
}

/// What a launch shows, and what its children are told.
#[derive(Debug)]
pub struct OfLaunch {
    /// For its own calls.
    pub credentials: Credentials,
    /// The run's own file, where the user has given no token. Children inherit the user's.
    own: Option<PathBuf>,
}

impl OfLaunch {
    /// What the environment gives, else the run's own token, if the run `stays_here`: on this machine's
    /// loopback.
    pub fn resolve(output_dir: &Path, env: Env<'_>, stays_here: bool) -> Result<Self, CliError> {
        if let Some(tokens) = check(env, stays_here)? {
            return Ok(Self { credentials: with(Some(tokens), env), own: None });
        }
        let path = output_dir.join(OWN);
        let unusable = |error| CliError::usage(format!("{}: {error}", path.display()));
        let path = std::path::absolute(&path).map_err(unusable)?;
        path.parent().map_or(Ok(()), fs::create_dir_all).map_err(unusable)?;
        let tokens = Tokens::of_own_file(&path)?;
        Ok(Self { credentials: with(Some(tokens), env), own: Some(path) })
    }

    /// Takes away the token that an earlier launch has left in the run's directory, if this one has the
    /// user's: commands would show it.
    pub fn tidy(&self, output_dir: &Path, env: Env<'_>) {
        let (path, place) = (output_dir.join(OWN), |path: &Path| fs::canonicalize(path).ok());
        let is_given = env(TOKEN_FILE).is_some_and(|given| place(Path::new(&given)) == place(&path));
        if self.own.is_none() && !is_given {
            // There is none, as a rule.
            let _ = fs::remove_file(path);
        }
    }

    /// What children are told beside what they inherit: where the file is, or, where others could read it,
    /// which a child would refuse, the token itself.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let Some(path) = &self.own else { return Vec::new() };
        let token = || self.credentials.tokens()?.for_scope(Scope::All);
        match Tokens::of_file(path) {
            Ok(_) => vec![(TOKEN_FILE, path.display().to_string())],
            Err(_) => token().iter().map(|token| (TOKEN, token.secret().to_owned())).collect(),
        }
    }
}

/// The tokens that the environment gives; a run that leaves its machine is refused without.
pub fn check(env: Env<'_>, stays_here: bool) -> Result<Option<Tokens>, CliError> {
    match given(env)? {
        None if !stays_here => Err(CliError::usage(
            "anyone who can reach the coordinator could control it; set COX_TOKEN to the same secret on every machine, for \
             instance COX_TOKEN=$(cox token), or COX_TOKEN_FILE to a file of tokens",
        )),
        tokens => Ok(tokens),
    }
}

/// What the environment gives.
pub fn of_env(env: Env<'_>) -> Result<Credentials, CliError> {
    Ok(with(given(env)?, env))
}

/// Whether a run has a token of its own, with which nothing but this run can be asked.
pub fn has_own(output_dir: &Path) -> bool {
    output_dir.join(OWN).exists()
}

/// The token of the run in `output_dir`, if it has one of its own, else what the environment gives.
pub fn of_run(output_dir: &Path, env: Env<'_>) -> Result<Credentials, CliError> {
    let path = output_dir.join(OWN);
    match has_own(output_dir) {
        // Asking with it harms nobody, even where others can read it.
        true => Ok(with(Some(Tokens::of_open_file(&path)?), env)),
        false => of_env(env),
    }
}

fn with(tokens: Option<Tokens>, env: Env<'_>) -> Credentials {
    let file = |name: &str| env(name).map(PathBuf::from);
    let certificates =
        CertificateFiles { cert: file("COX_TLS_CERT"), key: file("COX_TLS_KEY"), ca: file("COX_TLS_CA") };
    Credentials::new(tokens, certificates)
}

fn given(env: Env<'_>) -> Result<Option<Tokens>, CliError> {
    match (env(TOKEN), env(TOKEN_FILE)) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => {
            Err(CliError::usage(format!("{TOKEN} and {TOKEN_FILE} are both set; keep one")))
        }
        (Some(text), None) => {
            let token = Token::parse(text.trim());
            Ok(Some(Tokens::one(token.map_err(|error| CliError::usage(format!("{TOKEN}: {error}")))?)))
        }
        (None, Some(path)) => {
            let tokens = Tokens::of_file(Path::new(&path));
            Ok(Some(tokens.map_err(|error| CliError::usage(format!("{TOKEN_FILE}: {error}")))?))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const SECRET: &str = "0123456789abcdef0123456789abcdef";

    fn message<T>(result: Result<T, CliError>) -> String {
        result.err().unwrap().message.unwrap()
    }

    #[test]
    fn a_run_of_one_machine_makes_its_own_token_and_its_commands_find_it() {
        let dir = tempfile::tempdir().unwrap();
        let none = |_: &str| None;
        let launch = OfLaunch::resolve(dir.path(), &none, true).unwrap();
        let path = dir.path().join("logs/token");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(launch.variables(), [("COX_TOKEN_FILE", path.display().to_string())]);
        let shown =
            |credentials: &Credentials| credentials.tokens().unwrap().for_scope(Scope::Worker).unwrap();
        let ours = shown(&launch.credentials);
        assert!(shown(&of_run(dir.path(), &none).unwrap()).is(ours.secret()));
        // The second launcher of the same run.
        let second = OfLaunch::resolve(dir.path(), &none, true).unwrap();
        assert!(shown(&second.credentials).is(ours.secret()));
        assert!(!format!("{launch:?}").contains(&ours.secret()[8..]));
        // As on a file system that keeps no permissions.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(launch.variables(), [("COX_TOKEN", ours.secret().to_owned())]);
        assert!(shown(&of_run(dir.path(), &none).unwrap()).is(ours.secret()));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        second.tidy(dir.path(), &none);
        let told = |name: &str| (name == TOKEN_FILE).then(|| path.display().to_string());
        OfLaunch::resolve(dir.path(), &told, true).unwrap().tidy(dir.path(), &told);
        assert!(path.exists());
        // With a token of the user's the run has none of its own.
        let env = |name: &str| (name == TOKEN).then(|| SECRET.to_owned());
        let given = OfLaunch::resolve(dir.path(), &env, true).unwrap();
        given.tidy(dir.path(), &env);
        assert!(given.variables().is_empty() && !path.exists());
        assert!(shown(&of_run(dir.path(), &env).unwrap()).is(SECRET));
    }

    #[test]
    fn off_loopback_a_token_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        assert!(message(OfLaunch::resolve(dir.path(), &|_| None, false)).contains("COX_TOKEN=$(cox token)"));
    }

    #[test]
    fn what_cannot_be_a_token_is_refused_and_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tokens");
        fs::write(&file, SECRET).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        let file = file.display().to_string();
        for (set, expected) in [
            (vec![(TOKEN, "hunter2")], "COX_TOKEN: the token is too short"),
            (vec![(TOKEN, SECRET), (TOKEN_FILE, &file)], "both set"),
            (vec![(TOKEN_FILE, &file)], "chmod 600"),
            (vec![(TOKEN_FILE, "/nowhere")], "COX_TOKEN_FILE: /nowhere: No such file"),
        ] {
            let env = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
            let refused = message(of_env(&env));
            assert!(refused.contains(expected), "{refused}");
            assert!(!refused.contains("hunter2") && !refused.contains(SECRET), "{refused}");
        }
    }
}
