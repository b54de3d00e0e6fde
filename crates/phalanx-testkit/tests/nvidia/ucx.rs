//! The binding of UCX against its headers, and its library.
//!
//! `PHALANX_TEST_UCX_INCLUDE` names the folder of the headers; else they are looked for where Debian's libucx-dev has them.

use libtest_mimic::Trial;
use phalanx_sys::ucx::*;
use phalanx_testkit::{suite, ucx};
use std::mem::offset_of;
use std::path::PathBuf;
use std::process::Command;

const INCLUDE: &str = "PHALANX_TEST_UCX_INCLUDE";

pub fn trials() -> Vec<Trial> {
    let include = PathBuf::from(std::env::var_os(INCLUDE).unwrap_or_else(|| "/usr/include".into()));
    let header = "ucx/header";
    vec![
        match include.join("ucp/api/ucp.h").exists() {
            true => Trial::test(header, move || Ok(compare(&include)?)),
            false => suite::missing(header, format!("there is no ucp/api/ucp.h in {}", include.display())),
        },
        match ucx::missing() {
            None => Trial::test("ucx/library", || Ok(library()?)),
            Some(reason) => suite::ignored("ucx/library", &reason),
        },
    ]
}

macro_rules! fields {
    ($items:ident, $name:ident: $($field:ident),*) => {
        $items.push((format!("sizeof({})", stringify!($name)), size_of::<$name>() as i64));
        $($items.push((
            format!("offsetof({}, {})", stringify!($name), stringify!($field)),
            offset_of!($name, $field) as i64,
        ));)*
    };
}

macro_rules! values {
    ($items:ident: $($name:ident),*) => { $($items.push((stringify!($name).to_owned(), $name as i64));)* };
}

/// Expressions of C, and what they are in the binding.
fn items() -> Vec<(String, i64)> {
    let mut items = Vec::new();
    fields!(items, ucp_params_t: field_mask, features, estimated_num_eps, name);
    fields!(items, ucp_worker_params_t: thread_mode, cpu_mask, events, user_data, event_fd, flags, client_id);
    fields!(items, ucp_worker_attr_t: thread_mode, address_flags, address, address_length, max_am_header, name);
    fields!(items, ucp_ep_params_t: address, err_mode, err_handler, user_data, flags, sockaddr, conn_request, name, local_sockaddr);
    fields!(items, ucp_am_handler_param_t: field_mask, id, flags, cb, arg);
    fields!(items, ucp_am_recv_param_t: recv_attr, reply_ep);
    fields!(items, ucp_request_param_t: op_attr_mask, flags, request, cb, datatype, user_data, reply_buffer, memory_type, recv_info);
    fields!(items, ucs_status_t:);
    values!(items: UCP_FEATURE_AM, UCP_PARAM_FIELD_FEATURES, UCP_PARAM_FIELD_ESTIMATED_NUM_EPS);
    values!(items: UCP_WORKER_PARAM_FIELD_THREAD_MODE, UCS_THREAD_MODE_SERIALIZED, UCP_WORKER_ATTR_FIELD_ADDRESS);
    values!(items: UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE, UCP_EP_PARAM_FIELD_ERR_HANDLER);
    values!(items: UCP_ERR_HANDLING_MODE_PEER, UCP_AM_RECV_ATTR_FLAG_RNDV, UCP_AM_FLAG_WHOLE_MSG);
    values!(items: UCP_AM_SEND_FLAG_EAGER, UCP_AM_SEND_FLAG_RNDV);
    values!(items: UCP_OP_ATTR_FIELD_FLAGS, UCP_OP_ATTR_FIELD_MEMORY_TYPE, UCP_EP_CLOSE_FLAG_FORCE);
    for (name, status) in [
        ("UCS_OK", ucs_status_t::Ok),
        ("UCS_INPROGRESS", ucs_status_t::InProgress),
        ("UCS_ERR_CANCELED", ucs_status_t::Canceled),
        ("UCS_ERR_LAST", ucs_status_t::Last),
    ] {
        items.push((name.to_owned(), status.0.into()));
    }
    items
}

fn compare(include: &std::path::Path) -> Result<(), String> {
    let items = items();
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let [source, program] = ["items.c", "items"].map(|name| folder.path().join(name));
    let prints: String = items
        .iter()
        .map(|(expression, _)| format!("printf(\"%lld\\n\", (long long)({expression}));\n"))
        .collect();
    let text = format!(
        "#include <stdio.h>\n#include <stddef.h>\n#include <ucp/api/ucp.h>\nint main(void) {{\n{prints}return 0; }}\n"
    );
    std::fs::write(&source, text).map_err(|error| error.to_string())?;
    let compiled = Command::new("cc").arg("-I").arg(include).arg(&source).arg("-o").arg(&program).output();
    let compiled = compiled.map_err(|error| format!("cc: {error}"))?;
    if !compiled.status.success() {
        return Err(String::from_utf8_lossy(&compiled.stderr).into_owned());
    }
    let printed = Command::new(&program).output().map_err(|error| error.to_string())?;
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    let found: Vec<i64> = printed.lines().filter_map(|line| line.parse().ok()).collect();
    if found.len() != items.len() {
        return Err(format!("{} of {} values: {printed}", found.len(), items.len()));
    }
    let differs = items.iter().zip(&found).filter(|((_, ours), theirs)| ours != *theirs);
    let lines: Vec<String> = differs
        .map(|((expression, ours), theirs)| format!("{expression} is {theirs}, and {ours} here"))
        .collect();
    if lines.is_empty() { Ok(()) } else { Err(lines.join("\n")) }
}

fn library() -> Result<(), String> {
    let ucx = Ucx::load().map_err(|error| error.to_string())?;
    let (major, minor, _) = ucx.version();
    if (major, minor) < OLDEST {
        return Err(format!("version {major}.{minor}, which lacks no function"));
    }
    let text = ucx.describe(ucs_status_t::Canceled);
    if text.to_lowercase().contains("cancel") { Ok(()) } else { Err(text) }
}
