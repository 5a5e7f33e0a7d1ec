//! `cox token`: makes tokens.

use std::path::PathBuf;

use clap::Args;
use coxswain_identity::{Scope, Token, Tokens, certificate};

use crate::{
    credentials,
    exit::{CliError, Outcome},
    launch::inputs::process_env,
    render::say,
};

/// Flags of `cox token`.
#[derive(Args, Debug)]
pub struct TokenArgs {
    /// Permissions: `read` (view), `control` (view and steer), `worker` (join as a worker) or `all`
    #[arg(long, value_name = "read|control|worker|all", default_value_t = Scope::All)]
    scope: Scope,
    /// Append the token to this file, created if missing, instead of printing it
    #[arg(long, value_name = "FILE", conflicts_with = "certificate")]
    file: Option<PathBuf>,
    /// Print the certificate and server name that coordinators derive from COX_TOKEN (or the first token of
    /// COX_TOKEN_FILE), for clients other than `cox`
    #[arg(long, conflicts_with = "scope")]
    certificate: bool,
}

/// Shows a fresh token, or adds it to a file.
pub fn execute(args: &TokenArgs) -> Outcome {
    if args.certificate {
        let credentials = credentials::of_env(&process_env)?;
        let token = credentials.tokens().and_then(|tokens| tokens.for_scope(Scope::Read));
        let token =
            token.ok_or_else(|| CliError::usage("--certificate: set COX_TOKEN or COX_TOKEN_FILE first"))?;
        let (pem, name) = certificate(&token)?;
        say(format_args!("# server name: {name}\n{}", pem.trim_end()));
        return Ok(());
    }
    let token = Token::fresh(args.scope)?;
    match &args.file {
        None => say(token.secret()),
        Some(path) => {
            Tokens::add_to_file(path, &token)?;
            say(format_args!("{}: added a token with the scope `{}`", path.display(), args.scope))
        }
    };
    Ok(())
}
