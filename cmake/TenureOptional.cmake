# Dependencies that Tenure can be built without. Each missing one costs a feature, named in one
# line here and by `tenure info`. Those found are in TENURE_OPTIONAL_LIBRARIES.

set(TENURE_OPTIONAL_LIBRARIES)

# tenure_optional(NAME FOUND TARGET COST)
function(tenure_optional name found target cost)
  string(TOUPPER ${name} upper)
  if(found)
    set(TENURE_HAVE_${upper} 1 PARENT_SCOPE)
    set(TENURE_OPTIONAL_LIBRARIES ${TENURE_OPTIONAL_LIBRARIES} ${target} PARENT_SCOPE)
  else()
    set(TENURE_HAVE_${upper} 0 PARENT_SCOPE)
    message(STATUS "${name} not found: ${cost}")
  endif()
endfunction()

find_path(TENURE_ASIO_INCLUDE_DIR asio.hpp)
mark_as_advanced(TENURE_ASIO_INCLUDE_DIR)
if(TENURE_ASIO_INCLUDE_DIR)
  add_library(Tenure::asio INTERFACE IMPORTED)
  target_include_directories(Tenure::asio SYSTEM INTERFACE ${TENURE_ASIO_INCLUDE_DIR})
  target_compile_definitions(Tenure::asio INTERFACE ASIO_STANDALONE ASIO_NO_DEPRECATED)
endif()
tenure_optional(Asio "${TENURE_ASIO_INCLUDE_DIR}" Tenure::asio "no store over TCP")

find_package(SQLite3 QUIET)
if(SQLite3_FOUND AND NOT TARGET SQLite3::SQLite3)
  add_library(SQLite3::SQLite3 ALIAS SQLite::SQLite3) # its name before CMake 4.3
endif()
tenure_optional(SQLite "${SQLite3_FOUND}" SQLite3::SQLite3 "no recordings")

find_package(OpenSSL QUIET)
tenure_optional(OpenSSL "${OpenSSL_FOUND}" OpenSSL::SSL "no authenticated store over TCP")
