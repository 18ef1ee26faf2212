//! The token of the RPC port, from a file or the environment. A flag with the token itself would be
//! shown to every user of the host in the list of processes.

use mooncake_base::{Result, Token, env, options::read_file};

use super::MasterConfig;

/// Reads the token from the file that `--rpc_token_file` names; an empty name stands for no file.
///
/// # Errors
/// The file cannot be read, or has no token of at least 8 bytes.
pub(super) fn set_from_file(config: &mut MasterConfig, path: &str) -> Result<()> {
    config.rpc_token = match path.trim() {
        "" => None,
        path => {
            let token = read_file(path).and_then(|text| Token::new(&text));
            Some(token.map_err(|error| error.with("file", path))?)
        }
    };
    Ok(())
}

/// Reads the token from `MOONCAKE_MASTER_TOKEN`; an empty value stands for no token.
///
/// # Errors
/// The value has fewer than 8 bytes.
pub(super) fn from_environment() -> Result<Option<Token>> {
    let variable = &env::MOONCAKE_MASTER_TOKEN;
    let text = variable.read().filter(|text| !text.trim().is_empty());
    let token = text.map(|text| Token::new(&text)).transpose();
    token.map_err(|error| error.with("variable", variable.name))
}
