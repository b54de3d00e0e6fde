//! UCX: the part of UCP (`libucp`) that moves messages between processes.
//!
//! The structures have masks that say which of their fields count, and newer releases only add fields at their ends. So
//! those of UCX 1.11 serve for every later release.

#![allow(non_camel_case_types)]

use crate::functions::{addresses, c_name, table};
use crate::{Library, LoadError, MissingFunction, Search};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Where UCX may be.
pub const UCX: Search = Search {
    name: "UCX",
    files: &["libucp.so.0"],
    variable: "PHALANX_UCX_LIB",
    homes: &["UCX_HOME", "HPCX_UCX_DIR", "CONDA_PREFIX"],
    wheels: &["libucx/lib"],
    global: false,
};

/// The oldest supported release: major and minor version.
pub const OLDEST: (u32, u32) = (1, 11);

/// A status: 0 for success, 1 for an operation in progress, or a negative code of an error. It has one byte in C, too.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ucs_status_t(pub i8);

#[allow(missing_docs, non_upper_case_globals)]
impl ucs_status_t {
    pub const Ok: Self = Self(0);
    pub const InProgress: Self = Self(1);
    pub const Canceled: Self = Self(-16);
    /// Above every code of an error, below which pointers of requests lie.
    pub const Last: Self = Self(-100);
}

/// The answer of a call that may start an operation: nothing (complete), a status, or a request.
pub type ucs_status_ptr_t = *mut c_void;

/// An answer, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The operation is complete.
    Complete,
    /// The operation is under way; the request is freed by its owner.
    Request(*mut c_void),
    /// The operation has not begun.
    Error(ucs_status_t),
}

impl Answer {
    /// Takes an answer apart (`UCS_PTR_IS_ERR`).
    pub fn of(answer: ucs_status_ptr_t) -> Answer {
        match answer.addr() {
            0 => Answer::Complete,
            address if address >= ucs_status_t::Last.0 as isize as usize => {
                Answer::Error(ucs_status_t(address as i8))
            }
            _ => Answer::Request(answer),
        }
    }
}

/// A context.
pub type ucp_context_h = *mut c_void;
/// A worker.
pub type ucp_worker_h = *mut c_void;
/// An endpoint.
pub type ucp_ep_h = *mut c_void;
/// Settings, read from the environment.
pub type ucp_config_t = *mut c_void;

/// Features of a context.
pub const UCP_FEATURE_AM: u64 = 1 << 6;

/// `ucp_params_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct ucp_params_t {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: *const c_void,
    pub request_cleanup: *const c_void,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: *const c_char,
}

/// The field of features counts.
pub const UCP_PARAM_FIELD_FEATURES: u64 = 1;
/// The field of the number of endpoints counts.
pub const UCP_PARAM_FIELD_ESTIMATED_NUM_EPS: u64 = 1 << 6;

/// `ucp_worker_params_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct ucp_worker_params_t {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub cpu_mask: [u64; 16],
    pub events: c_uint,
    pub user_data: *mut c_void,
    pub event_fd: c_int,
    pub flags: u64,
    pub name: *const c_char,
    pub am_alignment: usize,
    pub client_id: u64,
}

/// The field of the thread mode counts.
pub const UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1;
/// Several threads use the worker, one at a time.
pub const UCS_THREAD_MODE_SERIALIZED: c_uint = 1;

/// `ucp_worker_attr_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct ucp_worker_attr_t {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub address_flags: u32,
    pub address: *mut c_void,
    pub address_length: usize,
    pub max_am_header: usize,
    pub name: [c_char; 32],
    pub max_debug_string: usize,
}

/// The address is asked for.
pub const UCP_WORKER_ATTR_FIELD_ADDRESS: u64 = 1 << 1;

/// `ucs_sock_addr_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct ucs_sock_addr_t {
    pub addr: *const c_void,
    pub addrlen: u32,
}

/// Called when an endpoint has failed.
pub type ucp_err_handler_cb_t = unsafe extern "C" fn(arg: *mut c_void, ep: ucp_ep_h, status: ucs_status_t);

/// `ucp_err_handler_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct ucp_err_handler_t {
    pub cb: Option<ucp_err_handler_cb_t>,
    pub arg: *mut c_void,
}

/// `ucp_ep_params_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct ucp_ep_params_t {
    pub field_mask: u64,
    pub address: *const c_void,
    pub err_mode: c_uint,
    pub err_handler: ucp_err_handler_t,
    pub user_data: *mut c_void,
    pub flags: c_uint,
    pub sockaddr: ucs_sock_addr_t,
    pub conn_request: *mut c_void,
    pub name: *const c_char,
    pub local_sockaddr: ucs_sock_addr_t,
}

/// The field of the peer's address counts.
pub const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1;
/// The field of the error mode counts.
pub const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 1 << 1;
/// The field of the error handler counts.
pub const UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 1 << 2;
/// Requests of an endpoint whose peer has failed end with an error.
pub const UCP_ERR_HANDLING_MODE_PEER: c_uint = 1;

/// `ucp_am_recv_param_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct ucp_am_recv_param_t {
    pub recv_attr: u64,
    pub reply_ep: ucp_ep_h,
}

/// The message's data is still to be received, by its descriptor.
pub const UCP_AM_RECV_ATTR_FLAG_RNDV: u64 = 1 << 17;

/// Called when a message has come.
pub type ucp_am_recv_callback_t = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t;

/// `ucp_am_handler_param_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct ucp_am_handler_param_t {
    pub field_mask: u64,
    pub id: c_uint,
    pub flags: u32,
    pub cb: Option<ucp_am_recv_callback_t>,
    pub arg: *mut c_void,
}

/// All fields of the handler count.
pub const UCP_AM_HANDLER_PARAM_FIELDS: u64 = 0b1111;
/// A message is handed over as a whole.
pub const UCP_AM_FLAG_WHOLE_MSG: u32 = 1;

/// The message's data goes with its header, however long it is.
pub const UCP_AM_SEND_FLAG_EAGER: u32 = 1 << 1;
/// The receiver fetches the message's data, however short it is.
pub const UCP_AM_SEND_FLAG_RNDV: u32 = 1 << 2;

/// `ucp_request_param_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct ucp_request_param_t {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    pub cb: *const c_void,
    pub datatype: u64,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: c_uint,
    pub recv_info: *mut c_void,
    pub memh: *mut c_void,
}

/// The field of flags counts.
pub const UCP_OP_ATTR_FIELD_FLAGS: u32 = 1 << 4;
/// The field of the memory's type counts. Its value 0 is memory of the host.
pub const UCP_OP_ATTR_FIELD_MEMORY_TYPE: u32 = 1 << 6;
/// The request is cancelled, not flushed, when an endpoint is closed.
pub const UCP_EP_CLOSE_FLAG_FORCE: u32 = 1;

impl ucp_request_param_t {
    /// Parameters of an operation on host memory, with flags.
    pub const fn on_host(flags: u32) -> ucp_request_param_t {
        ucp_request_param_t {
            op_attr_mask: UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
            flags,
            request: std::ptr::null_mut(),
            cb: std::ptr::null(),
            datatype: 0,
            user_data: std::ptr::null_mut(),
            reply_buffer: std::ptr::null_mut(),
            memory_type: 0,
            recv_info: std::ptr::null_mut(),
            memh: std::ptr::null_mut(),
        }
    }
}

macro_rules! functions {
    ($($name:ident($($argument:ident: $ty:ty),*) $(-> $answer:ty)?;)*) => {
        table! {
            /// The functions. Every supported release has all of them.
            #[allow(missing_docs)]
            pub struct Functions { $(pub $name: unsafe extern "C" fn($($argument: $ty),*) $(-> $answer)?,)* }
        }

        const SYMBOLS: [&CStr; Functions::FIELDS.len()] = [$(c_name(concat!(stringify!($name), "\0"))),*];
    };
}

functions! {
    ucp_get_version(major: *mut c_uint, minor: *mut c_uint, release: *mut c_uint);
    ucp_config_read(prefix: *const c_char, file: *const c_char, config: *mut ucp_config_t) -> ucs_status_t;
    ucp_config_modify(config: ucp_config_t, name: *const c_char, value: *const c_char) -> ucs_status_t;
    ucp_config_release(config: ucp_config_t);
    ucp_init_version(major: c_uint, minor: c_uint, params: *const ucp_params_t, config: ucp_config_t, context: *mut ucp_context_h) -> ucs_status_t;
    ucp_cleanup(context: ucp_context_h);
    ucp_worker_create(context: ucp_context_h, params: *const ucp_worker_params_t, worker: *mut ucp_worker_h) -> ucs_status_t;
    ucp_worker_destroy(worker: ucp_worker_h);
    ucp_worker_query(worker: ucp_worker_h, attr: *mut ucp_worker_attr_t) -> ucs_status_t;
    ucp_worker_release_address(worker: ucp_worker_h, address: *mut c_void);
    ucp_worker_set_am_recv_handler(worker: ucp_worker_h, param: *const ucp_am_handler_param_t) -> ucs_status_t;
    ucp_worker_progress(worker: ucp_worker_h) -> c_uint;
    ucp_worker_flush_nbx(worker: ucp_worker_h, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_ep_create(worker: ucp_worker_h, params: *const ucp_ep_params_t, ep: *mut ucp_ep_h) -> ucs_status_t;
    ucp_ep_close_nbx(ep: ucp_ep_h, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_am_send_nbx(ep: ucp_ep_h, id: c_uint, header: *const c_void, header_length: usize, buffer: *const c_void, count: usize, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_am_recv_data_nbx(worker: ucp_worker_h, descriptor: *mut c_void, buffer: *mut c_void, count: usize, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_am_data_release(worker: ucp_worker_h, data: *mut c_void);
    ucp_request_check_status(request: *mut c_void) -> ucs_status_t;
    ucp_request_free(request: *mut c_void);
}

/// A loaded UCX.
#[derive(Debug)]
pub struct Ucx {
    library: Library,
    functions: Functions,
    version: (u32, u32, u32),
    status_string: Option<unsafe extern "C" fn(ucs_status_t) -> *const c_char>,
    set_option: Option<unsafe extern "C" fn(*const c_char, *const c_char) -> ucs_status_t>,
}

impl std::ops::Deref for Ucx {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Ucx {
    /// Loads UCX.
    ///
    /// # Errors
    /// [`LoadError`] with the places that were tried, or the missing function.
    pub fn load() -> Result<Ucx, LoadError> {
        let library = UCX.open()?;
        let version = version(&library);
        let addresses = addresses(&library, &SYMBOLS);
        if let Some(missing) = addresses.iter().position(Option::is_none) {
            let (major, minor, release) = version;
            return Err(LoadError::MissingFunction(MissingFunction {
                function: Functions::FIELDS[missing],
                library: UCX.name,
                version: format!("{major}.{minor}.{release}"),
                path: library.path().to_owned(),
            }));
        }
        // SAFETY: the fields' types are those of the C header, and all functions are there.
        let functions = unsafe { Functions::from_addresses(addresses) };
        // SAFETY: functions of libucs, which libucp needs, of these types.
        let (status_string, set_option) =
            unsafe { (library.symbol(c"ucs_status_string"), library.symbol(c"ucs_global_opts_set_value")) };
        Ok(Ucx { library, functions, version, status_string, set_option })
    }

    /// Major, minor and release number.
    pub fn version(&self) -> (u32, u32, u32) {
        self.version
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// UCX's text for a status.
    pub fn describe(&self, status: ucs_status_t) -> String {
        // SAFETY: any status may be asked for; the text is a constant.
        let text = self.status_string.map(|text| unsafe { CStr::from_ptr(text(status)) });
        text.map_or_else(|| format!("status {}", status.0), |text| text.to_string_lossy().into_owned())
    }

    /// Sets an option of the whole library, unless the environment has it (as `UCX_` and the name).
    pub fn set_default(&self, name: &CStr, value: &CStr) {
        let variable = format!("UCX_{}", name.to_string_lossy());
        if let Some(set) = self.set_option.filter(|_| std::env::var_os(variable).is_none()) {
            // SAFETY: both are strings, which are copied.
            unsafe { set(name.as_ptr(), value.as_ptr()) };
        }
    }
}

fn version(library: &Library) -> (u32, u32, u32) {
    type GetVersion = unsafe extern "C" fn(*mut c_uint, *mut c_uint, *mut c_uint);
    // SAFETY: the function has this type in every release.
    let get: Option<GetVersion> = unsafe { library.symbol(c"ucp_get_version") };
    let [mut major, mut minor, mut release] = [0; 3];
    if let Some(get) = get {
        // SAFETY: three variables to write to.
        unsafe { get(&raw mut major, &raw mut minor, &raw mut release) };
    }
    (major, minor, release)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_nothing_a_request_or_an_error() {
        let error = ucs_status_t::Canceled.0 as isize as usize;
        assert_eq!(Answer::of(std::ptr::null_mut()), Answer::Complete);
        assert_eq!(Answer::of(error as ucs_status_ptr_t), Answer::Error(ucs_status_t::Canceled));
        let request = 0x7f00_0000_1000 as ucs_status_ptr_t;
        assert_eq!(Answer::of(request), Answer::Request(request));
    }
}
