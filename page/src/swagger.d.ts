// Swagger UI's package has no types of its own.
declare module "swagger-ui-dist/swagger-ui-es-bundle.js" {
  export default function SwaggerUI(options: Record<string, unknown>): { preauthorizeApiKey(name: string, key: string): void };
}
