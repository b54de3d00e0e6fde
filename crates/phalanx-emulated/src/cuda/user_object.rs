//! User objects: callers' objects that graphs keep alive.

use super::error::INVALID_VALUE;
use crate::base::call::{Answer, Code, exported, in_host_function};
use crate::base::handles::{self, Handle, Handles};
use crate::base::lock::lock;
use crate::base::pointers::Out;
use crate::base::random;
use std::ffi::{c_uint, c_void};
use std::sync::{Arc, Mutex};

/// A caller's object and its destructor.
pub struct UserObject {
    handle: Handle,
    data: *mut c_void,
    destroy: unsafe extern "C" fn(*mut c_void),
}

// SAFETY: the caller passes the object for its destructor to run in any thread (`cuUserObjectCreate`).
unsafe impl Send for UserObject {}
// SAFETY: only the destructor uses the pointer.
unsafe impl Sync for UserObject {}

/// A reference to a user object.
#[derive(Clone)]
pub struct Reference(Arc<UserObject>);

/// The references that a graph keeps.
pub type Kept = Vec<Reference>;

/// The references that callers own.
static OWNED: Handles<Mutex<Kept>> = Handles::new("user object");

impl Drop for UserObject {
    fn drop(&mut self) {
        let (data, destroy) = (self.data as usize, self.destroy);
        // CUDA does not promise in which thread or when the destructor runs.
        std::thread::spawn(move || {
            random::shared().delay();
            // SAFETY: the caller passed the function to be called once with this argument.
            in_host_function(|| unsafe { destroy(data as *mut c_void) });
        });
    }
}

impl Reference {
    pub fn handle(&self) -> Handle {
        self.0.handle
    }
}

/// References for a graph: new ones, or the caller's own with `CU_GRAPH_USER_OBJECT_MOVE`.
pub fn for_graph(function: &str, object: Handle, count: c_uint, flags: c_uint) -> Result<Kept, Code> {
    let owned = OWNED.get(function, object);
    let mut owned = lock(&owned);
    let first = owned.first().cloned().ok_or(INVALID_VALUE)?;
    match flags {
        0 => Ok(vec![first; count as usize]),
        1 if owned.len() >= count as usize => Ok(owned.drain(..count as usize).collect()),
        _ => Err(INVALID_VALUE),
    }
}

fn release(function: &str, object: Handle, count: c_uint) -> Answer {
    let owned = OWNED.get(function, object);
    let mut owned = lock(&owned);
    if owned.len() < count as usize {
        return Err(INVALID_VALUE);
    }
    owned.drain(..count as usize);
    Ok(())
}

exported! {
    fn cuUserObjectCreate(
        object: Out<Handle>, data: *mut c_void, destroy: Option<unsafe extern "C" fn(*mut c_void)>, count: c_uint,
        flags: c_uint,
    ) {
        // The only flag is mandatory: no synchronisation with the destructor.
        if flags != 1 || count == 0 {
            return Err(INVALID_VALUE);
        }
        let handle = handles::fresh();
        let reference = Reference(Arc::new(UserObject { handle, data, destroy: destroy.ok_or(INVALID_VALUE)? }));
        OWNED.insert(handle, Arc::new(Mutex::new(vec![reference; count as usize])));
        object.set(handle);
        Ok(())
    }

    fn cuUserObjectRetain(object: Handle, count: c_uint) {
        let owned = OWNED.get(FUNCTION, object);
        let mut owned = lock(&owned);
        let first = owned.first().cloned().ok_or(INVALID_VALUE)?;
        owned.extend(vec![first; count as usize]);
        Ok(())
    }

    fn cuUserObjectRelease(object: Handle, count: c_uint) {
        release(FUNCTION, object, count)
    }
}
